"""Parity sums: a parity under way, of which every byte is proven whenever something is added to it.

Its rows are cut into stretches, as the pieces cross. A stretch begins as zeros with the first piece
that is added to it. From then on its checksum is known: with the next piece it is proven as it is
read, and taken anew as it is written, in one pass over pieces that stay in the cache.
"""

from __future__ import annotations

from pathlib import Path

from keepstep.coding.checksum import checksum, running_checksum
from keepstep.coding.reed_solomon import accumulate
from keepstep.coding.reference import Rows
from keepstep.errors import DamageError
from keepstep.model.units import KIB

TILE_BYTES = 512 * KIB  # of the piece, and as much of the parity


class ParitySums:
    """Of `parity`, rows of `row_bytes` each, of which `checked_bytes` share a checksum. Not for
    several threads at once."""

    def __init__(self, parity: memoryview, row_bytes: int, checked_bytes: int) -> None:
        self._parity, self._row_bytes, self._checked_bytes = parity, row_bytes, checked_bytes
        self._sums: dict[int, int] = {}  # by a stretch's offset
        self._flaw: str | None = None

    def add(self, row: int, at: int, rows: Rows, index: int, data: memoryview) -> None:
        """Add a piece, times its coefficient, to the stretch that begins `at` in this row."""
        start = row * self._row_bytes + at
        stretch = self._stretch(start)
        known = self._sums.get(start)
        before, after = running_checksum(), running_checksum()
        for begin in range(0, len(stretch), TILE_BYTES):
            tile = stretch[begin : begin + TILE_BYTES]
            if known is None:
                tile[:] = bytes(len(tile))
            else:
                before.update(tile)
            accumulate(rows, index, data[begin : begin + len(tile)], [tile])
            after.update(tile)
        if known is not None:
            self._compare(start, known, before.intdigest())
        self._sums[start] = after.intdigest()

    def _stretch(self, start: int) -> memoryview:
        row_end = (start // self._row_bytes + 1) * self._row_bytes
        return self._parity[start : min(start + self._checked_bytes, row_end)]

    def _compare(self, start: int, expected: int, found: int) -> None:
        if found != expected:
            self._flaw = (
                f"the parity under way is damaged at {start}: checksum expected {expected:016x}, "
                f"found {found:016x}"
            )

    def finish(self, path: Path) -> dict[int, int]:
        """Everything has been added. Returns the checksums of the slot's blocks that are known, by
        their number; what was put into none of them is proven here. Raises DamageError when a bit
        has flipped."""
        known: dict[int, int] = {}
        for row_start in range(0, len(self._parity), self._row_bytes):
            for at in range(0, self._row_bytes, self._checked_bytes):
                self._finish(row_start + at, known)
        if self._flaw is not None:
            raise DamageError(f"{path}: {self._flaw}")
        return known

    def _finish(self, start: int, known: dict[int, int]) -> None:
        stretch = self._stretch(start)
        if start not in self._sums:  # all pieces end before it
            stretch[:] = bytes(len(stretch))
        elif start % self._checked_bytes == 0 and len(stretch) == self._checked_bytes:
            known[start // self._checked_bytes] = self._sums[start]
        else:  # no block of the slot: it is hashed with what lies beside it
            self._compare(start, self._sums[start], checksum(stretch))
