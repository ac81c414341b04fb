"""One pass: bytes copied into a slot and hashed where they were written, while they are cached.

Comes in: what lies where, by address. Goes out: the bytes in the slot, and the checksums of the
blocks that were hashed, for `Slot.write_table`. When somebody waits for the copy, the rest of it is
copied alone: its hash is nothing to wait for. A block that another rank keeps is not copied but
hashed where it lies, always: later its bytes are gone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

from keepstep.coding.checksum import running_checksum
from keepstep.edge.shm import copy_table
from keepstep.edge.shm.copy_table import CopyTable, Move
from keepstep.edge.shm.slot import Slot

_offset = attrgetter("offset")


def copy_and_hash(
    slot: Slot,
    tables: Sequence[CopyTable],
    payload_bytes: int,
    not_yet: Collection[int],
    is_awaited: Callable[[], bool],
    lacking: Collection[int] = (),
    look: Callable[[int], None] | None = None,
    elsewhere: Collection[int] = (),
) -> dict[int, int]:
    """Make the copies of these tables, which do not overlap. Returns the checksums of payload
    blocks, by their number, of which all bytes are there then, and of those that are `lacking`:
    these are not copied, and what lies between the copies is hashed as zeros.

    `not_yet`: blocks that somebody else still writes. `is_awaited`: whether somebody waits for the
    copies; asked again and again. `look`: hears up to which offset the copies are there, while the
    newest bytes are cached; not of those that were waited for. `elsewhere`: blocks of which, where
    they are lacking, somebody else takes the checksums. Raises OSError as `Move.make` does.
    """
    window_bytes = copy_table.WINDOW_BYTES
    assert slot.block_bytes % window_bytes == 0, "moves do not end with blocks"
    moves = sorted((move for table in tables for move in table.moves), key=_offset, reverse=True)
    payload = slot.payload
    known: dict[int, int] = {}
    for block, begin in enumerate(range(0, payload_bytes, slot.block_bytes)):
        end = min(begin + slot.block_bytes, payload_bytes)
        if block in lacking:
            left = list(_before(moves, end))
            if block not in elsewhere:
                known[block] = _sum_in_place(left, begin, end)
            continue
        running = running_checksum()
        for at in range(begin, end, window_bytes):
            if is_awaited():
                known.update(_make_rest(slot, moves, payload_bytes, lacking, elsewhere))
                return known
            stop = min(at + window_bytes, end)
            _make_before(moves, stop, slot)
            if block not in not_yet:
                running.update(payload[at:stop])
            if look is not None:
                look(stop)
        if block not in not_yet:
            known[block] = running.intdigest()
    return known


def make_kept(slot: Slot, table: CopyTable, lacking: Collection[int]) -> None:
    """All copies of the table but those into blocks that others keep. Hashes nothing."""
    for move in table.moves:
        if move.offset // slot.block_bytes not in lacking:
            move.make(slot)


def _make_rest(
    slot: Slot,
    moves: list[Move],
    payload_bytes: int,
    lacking: Collection[int],
    elsewhere: Collection[int],
) -> dict[int, int]:
    """Without hashing, but for what lies with other ranks."""
    size = slot.block_bytes
    known: dict[int, int] = {}
    for block in sorted(lacking):
        if moves and moves[-1].offset < (block + 1) * size:
            _make_before(moves, block * size, slot)
            end = min((block + 1) * size, payload_bytes)
            left = list(_before(moves, end))
            if block not in elsewhere:
                known[block] = _sum_in_place(left, block * size, end)
    _make_before(moves, payload_bytes, slot)
    return known


def _make_before(moves: list[Move], stop: int, slot: Slot) -> None:
    for move in _before(moves, stop):
        move.make(slot)


def _before(moves: list[Move], stop: int) -> Iterator[Move]:
    """Takes from the end, where the first ones are, what goes to offsets before `stop`."""
    while moves and moves[-1].offset < stop:
        yield moves.pop()


def _sum_in_place(moves: Iterable[Move], begin: int, end: int) -> int:
    """The checksum of a block as it would be in the slot."""
    running, at = running_checksum(), begin
    for offset, source, nbytes in chain.from_iterable(move.copies for move in moves):
        running.update(bytes(offset - at))
        running.update((ctypes.c_char * nbytes).from_address(source))
        at = offset + nbytes
    running.update(bytes(end - at))
    return running.intdigest()
