"""Tail: what is added to a file of lines between two looks. A look costs what was added, not what
is there."""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.edge.os.own_file import read_regular


class Tail:
    def __init__(self, path: Path, from_its_end: bool = False) -> None:
        self._path = path
        self._offset_bytes = path.stat().st_size if from_its_end and path.exists() else 0

    def new(self) -> bytes:
        """The whole lines since the last look. One that is still being written is one of the next;
        a file that shrank is another one."""
        try:
            with open(read_regular(self._path), "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset_bytes:
                    self._offset_bytes = 0
                file.seek(self._offset_bytes)
                added = file.read()
        except FileNotFoundError:
            return b""
        whole = added[: added.rfind(b"\n") + 1]
        self._offset_bytes += len(whole)
        return whole
