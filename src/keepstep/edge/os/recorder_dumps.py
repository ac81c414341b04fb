"""Dumps of torch's flight recorder, read from files.

Comes in: a path, and who reads pickles. Goes out: the values of the dump, or None where the file is
something else. What they mean `core/postmortem/recorder.py` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from keepstep.edge.os.own_file import read_regular
from keepstep.errors import UntrustedError
from keepstep.model.decoding import from_json
from keepstep.model.units import MIB

MOST_BYTES = 64 * MIB
HEAD_BYTES = 4096
PICKLE = b"\x80"
TEXT = b"{"
WORDS = (b"pg_config", b"pg_status", b"comm_lib_version", b"nccl_version", b"entries")


def read_dump(
    path: Path, unpickle: Callable[[bytes], object], most_bytes: int = MOST_BYTES
) -> object | None:
    """None where it is no such dump. `unpickle`: of plain values; raises UntrustedError. Raises
    OSError where the file cannot be read, ValueError where it is a dump and damaged, or too
    large."""
    try:
        fd = read_regular(path)  # opening a pipe would wait for its writer
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        head = file.read(HEAD_BYTES)
        if head[:1] not in (PICKLE, TEXT) or not any(word in head for word in WORDS):
            return None
        text = head + file.read(most_bytes + 1 - len(head))
    if len(text) > most_bytes:
        raise ValueError(f"a flight recorder's dump: expected at most {most_bytes} bytes")
    if text[:1] == TEXT:
        try:
            document: object = from_json(text)
            return document
        except ValueError:
            return None  # a log whose first line is JSON is a log
    try:
        return unpickle(text)
    except UntrustedError as error:
        raise ValueError(f"a flight recorder's dump: {error}") from error
