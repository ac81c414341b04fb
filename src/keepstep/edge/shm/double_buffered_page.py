"""Double-buffered page: one page of shared memory in two halves, written in turn, each with a
sequence number under its checksum.

A reader takes the newest whole half, so a write under way, a torn read or a writer killed in
mid-write costs at most one update. One writing process, any number of readers; never waits.
"""

from __future__ import annotations

import struct
import threading
from pathlib import Path

from keepstep.coding.checksum import checksum
from keepstep.model.units import PAGE_BYTES
from keepstep.ports import Memory, Region

_HEAD = struct.Struct("<QI4x")  # checksum and bytes of what follows: the sequence and the body
_SEQUENCE = struct.Struct("<Q")
HALF_BYTES = PAGE_BYTES // 2
MAX_BODY_BYTES = HALF_BYTES - _HEAD.size - _SEQUENCE.size
_MARKS = struct.Struct(
    f"<QI4xQ{HALF_BYTES - _HEAD.size - _SEQUENCE.size}xQI4xQ"
)  # of both halves: the head, and the sequence that follows it
UNWRITTEN = (0,) * 6


class DoubleBufferedPage:
    """The page, mapped."""

    def __init__(self, region: Region) -> None:
        """Raises ValueError when that is no page; it is closed then."""
        self._region = region
        # Whether its name still leads to this page: asked as often as the page is read.
        self.is_there = region.is_there
        self._lock = threading.Lock()
        # the marks when something was read last, and what that was
        self._known: tuple[tuple[int, ...], bytes | None] = (UNWRITTEN, None)
        # the marks when something was written here last: as long as they stay, that is the newest
        self._written = UNWRITTEN
        if len(region.view) != PAGE_BYTES:
            nbytes = len(region.view)
            region.close()
            raise ValueError(
                f"{region.path}: expected a page of {PAGE_BYTES} bytes, found {nbytes}"
            )

    @classmethod
    def open(cls, memory: Memory, path: Path) -> DoubleBufferedPage:
        """Map an existing page. Raises OSError or ValueError when there is none."""
        return cls(memory.open(path))

    @classmethod
    def ensure(cls, memory: Memory, path: Path) -> DoubleBufferedPage:
        """Map the page, making it if there is none. Raises OSError, MemoryBudgetError."""
        return cls(memory.ensure(path, PAGE_BYTES))

    def lock(self, exclusive: bool) -> bool:
        """Try to lock the page's file for this mapping of it; False when others hold it."""
        return self._region.lock(exclusive)

    def unlock(self) -> None:
        self._region.unlock()

    def write(self, body: bytes) -> None:
        """Into the half that does not hold the newest, its checksum last."""
        nbytes = _SEQUENCE.size + len(body)
        assert nbytes <= HALF_BYTES - _HEAD.size, f"{len(body)} bytes"
        with self._lock:
            view = self._region.view
            marks = _MARKS.unpack_from(view)
            if marks == self._written:
                sequence = max(marks[2], marks[5]) + 1
            else:
                newest = self._newest(marks)
                sequence = 1 if newest is None else newest[0] + 1
            body = _SEQUENCE.pack(sequence) + body
            found = checksum(body)
            at = HALF_BYTES * (sequence % 2)
            view[at + _HEAD.size : at + _HEAD.size + nbytes] = body
            _HEAD.pack_into(view, at, found, nbytes)
            mine = (found, nbytes, sequence)
            self._written = (*marks[:3], *mine) if at else (*mine, *marks[3:])

    def read(self) -> bytes | None:
        """The newest whole body, the same object for as long as nothing else was written; None when
        none ever was.

        As long as both halves' marks stay, nothing was written: the sequence is among them, and
        grows. What is remembered was whole when it was read, and the newest that the marks name:
        else a head that was visible before its body would hide that for ever.
        """
        marks = _MARKS.unpack_from(self._region.view)
        known, body = self._known
        return body if marks == known else self._read_newest()

    def _read_newest(self) -> bytes | None:
        for _ in range(100):  # again only when the writer came round twice meanwhile
            marks = _MARKS.unpack_from(self._region.view)
            newest = self._newest(marks)
            if newest is not None:
                sequence, body = newest
                if sequence == max(marks[2], marks[5]):
                    self._known = marks, body
                return body
        return None

    def _newest(self, marks: tuple[int, ...]) -> tuple[int, bytes] | None:
        """(sequence, body) of the newer half that is whole."""
        for at in (0, HALF_BYTES) if marks[2] > marks[5] else (HALF_BYTES, 0):
            want, size = _HEAD.unpack_from(self._region.view, at)
            body = bytes(
                self._region.view[
                    at + _HEAD.size : at + _HEAD.size + min(size, HALF_BYTES - _HEAD.size)
                ]
            )
            if size and checksum(body) == want:
                return _SEQUENCE.unpack_from(body)[0], body[_SEQUENCE.size :]
        return None

    def close(self) -> None:
        self._region.close()
