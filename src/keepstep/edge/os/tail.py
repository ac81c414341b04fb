"""Tail: what is added to a file of lines between two looks. A look costs what was added, not what
is there; and no more memory than a line may be long, whatever the file holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from keepstep.edge.os.own_file import read_if_of
from keepstep.model.units import MIB

MOST_LINE_BYTES = 16 * MIB


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """From where it stands to its end. What is longer than a line may be comes in pieces, which say
    nothing: a file of one hole would fill the memory."""
    while line := file.readline(MOST_LINE_BYTES):
        yield line


class Tail:
    def __init__(self, path: Path, from_its_end: bool = False, owner: int | None = None) -> None:
        """owner: whose the file and its directory must be, else there is nothing."""
        self._path, self._owner = path, owner
        self._offset_bytes = path.stat().st_size if from_its_end and path.exists() else 0

    def new(self) -> Iterator[bytes]:
        """The whole lines since the last look. One that is still being written is one of the next;
        a file that shrank is another one."""
        fd = read_if_of(self._path, self._owner)
        if fd is None:
            return
        with open(fd, "rb") as file:
            if os.fstat(fd).st_size < self._offset_bytes:
                self._offset_bytes = 0
            file.seek(self._offset_bytes)
            for line in lines_of(file):
                if not line.endswith(b"\n") and len(line) < MOST_LINE_BYTES:
                    return
                self._offset_bytes += len(line)
                yield line
