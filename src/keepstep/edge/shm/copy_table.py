"""Copy table: which bytes go where in a payload, made once and followed for every snapshot.

A step changes what tensors hold, and seldom where they lie. So what their copies need is worked out
once: copies that are neighbours in both places are one, and small ones that lie beside each other
in the payload are one system call, which takes addresses (`writev(2)`): no line of Python's and no
GIL for each of them. Large ones stay memcpy.

Comes in: what lies where, by address. Goes out: moves in the order of the payload, none of them
across the edge of a window, for who hashes each window while it is in the cache (`one_pass.py`).

Invariant: following a table writes the bytes of its copies, zeros between two small ones that are
less than `ALIGN_BYTES` apart (a layout has nothing there), and nothing else.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from keepstep.edge.shm.memory import MOST_RANGES, Ranges, copy_all
from keepstep.edge.shm.slot import Slot
from keepstep.model.layout import ALIGN_BYTES
from keepstep.model.units import KIB, MIB

# Half of a usual second-level cache. Smaller ones gain nothing, and each costs the GIL twice.
WINDOW_BYTES = MIB
# Below it a copy by the system, page by page, costs no more than one by Python (measured).
GATHERED_BYTES = 16 * KIB
FEW = 4  # so many small copies take no longer one by one than a system call

_ZEROS = ctypes.create_string_buffer(ALIGN_BYTES)
_ZEROS_AT = ctypes.addressof(_ZEROS)


class SlotCopy(NamedTuple):
    """So many bytes from an address to an offset in the payload."""

    offset: int
    source: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Move:
    """Copies that are made at once, from `offset` on. `ranges`: what lies there then, one behind
    the other, where one system call does it."""

    offset: int
    copies: tuple[SlotCopy, ...]
    ranges: Ranges | None = None

    def make(self, slot: Slot) -> None:
        """Raises OSError when some of it is no memory of this process any more, or the slot is
        closed."""
        if self.ranges is None or not _is_gathered(slot, self.offset, self.ranges):
            base = slot.payload_address
            copy_all((base + offset, source, nbytes) for offset, source, nbytes in self.copies)


def _is_gathered(slot: Slot, offset: int, ranges: Ranges) -> bool:
    """Whether one system call has done it. Writing a file has limits that its map has not
    (`ulimit -f`): where it is refused, all is left to do."""
    try:
        written = slot.gather(offset, ranges.address, ranges.count)
    except OSError as error:
        if error.errno in (errno.EFAULT, errno.EBADF):
            raise
        return False
    if written != ranges.nbytes:
        why = f"only {written} of {ranges.nbytes} bytes could be read"
        raise OSError(errno.EFAULT, f"{os.strerror(errno.EFAULT)}: {why}", str(slot.path))
    return True


class CopyTable:
    """Of copies that do not overlap, in any order. Whoever makes one keeps the sources alive."""

    def __init__(self, copies: Iterable[SlotCopy] = ()) -> None:
        pieces = _cut(_joined(sorted(copy for copy in copies if copy.nbytes)))
        self.moves: tuple[Move, ...] = tuple(_moves(pieces))

    def make(self, slot: Slot) -> None:
        """All of them."""
        for move in self.moves:
            move.make(slot)


def _joined(copies: Iterable[SlotCopy]) -> Iterator[SlotCopy]:
    """Neighbours in both places are one copy."""
    before: SlotCopy | None = None
    for copy in copies:
        if before is None:
            before = copy
        elif copy.offset == before.end and copy.source == before.source + before.nbytes:
            before = before._replace(nbytes=before.nbytes + copy.nbytes)
        else:
            yield before
            before = copy
    if before is not None:
        yield before


def _cut(copies: Iterable[SlotCopy]) -> Iterator[SlotCopy]:
    """At the edges of windows."""
    for copy in copies:
        at = copy.offset
        while at < copy.end:
            stop = min(copy.end, at - at % WINDOW_BYTES + WINDOW_BYTES)
            yield SlotCopy(at, copy.source + at - copy.offset, stop - at)
            at = stop


def _moves(pieces: Iterable[SlotCopy]) -> Iterator[Move]:
    run: list[SlotCopy] = []
    for piece in pieces:
        if run and not _goes_on(run[-1], piece, len(run)):
            yield _move(run)
            run = []
        run.append(piece)
    if run:
        yield _move(run)


def _goes_on(before: SlotCopy, piece: SlotCopy, count: int) -> bool:
    """Whether this piece may be made at once with `count` others that come before."""
    return (
        before.nbytes < GATHERED_BYTES
        and piece.nbytes < GATHERED_BYTES
        and piece.offset - before.end < ALIGN_BYTES
        and piece.offset // WINDOW_BYTES == before.offset // WINDOW_BYTES
        and 2 * count < MOST_RANGES - 1  # each, and what lies between them
    )


def _move(run: Sequence[SlotCopy]) -> Move:
    if len(run) <= FEW:
        return Move(run[0].offset, tuple(run))
    ranges, at = [], run[0].offset
    for copy in run:
        if copy.offset > at:
            ranges.append((_ZEROS_AT, copy.offset - at))
        ranges.append((copy.source, copy.nbytes))
        at = copy.end
    return Move(run[0].offset, tuple(run), Ranges(ranges))
