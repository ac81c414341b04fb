"""Dedup: blocks of a snapshot that this node has already: in the older copy of it that rests here,
or because one of its own ranks holds the same bytes.

What does not learn is the same in every generation (frozen weights are most of a fine-tuned model),
and data-parallel replicas agree in nearly all of their state: a holder need not be sent either. Two
blocks are taken for equal when their tables name the same checksum and length; what is copied is
hashed as it is written, so that a bit which flipped here at rest is not taken over but asked for.
Done beside the loop, at memory speed.

The tables of the own ranks are read once a generation, and only told apart by its stamp: what is
remembered of them says where to look, never what is there. So nothing has to be forgotten when a
slot is overwritten or damaged: its bytes do not prove, and come from elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.snapshot import SlotState, Stamp
from keepstep.model.wire import BlockRange, Part
from keepstep.runtime.replication.receive import IncomingSnapshot
from keepstep.runtime.slot_locks import OwnSlots

BlockSum = tuple[int, int]  # checksum and length


class OlderCopy(NamedTuple):
    """Of another generation, as far as it may have the same blocks: its table and payload. It may
    be given up or overwritten at any time: what is taken from it is proven."""

    table: Sequence[int]
    payload: memoryview
    lacking: frozenset[int] = frozenset()  # of its blocks, which others keep


def older_copy(slots: Iterable[Slot]) -> OlderCopy | None:
    """The newest snapshot in these slots; None when there is none. Called in the loop, which alone
    closes them; what is returned may be read beside it."""
    newest: tuple[Stamp, OlderCopy] | None = None
    for slot in slots:
        try:
            header = slot.header()
            is_newer = newest is None or header.stamp > newest[0]
            if header.state is SlotState.SEALED and is_newer:
                payload = slot.part(Part.PAYLOAD, header)
                older = OlderCopy(slot.table(header), payload, slot.lacking())
                newest = header.stamp, older
        except DamageError:
            continue  # scrubbing will find it too
    return None if newest is None else newest[1]


def take_unchanged(incoming: IncomingSnapshot, table: tuple[int, ...], older: OlderCopy) -> None:
    """Fill `incoming`, whose table this is, with the blocks that `older` has too."""
    block_bytes = incoming.slot.block_bytes
    places: dict[BlockSum, int] = {}  # offsets
    for block, known in enumerate(older.table):
        at = block * block_bytes
        if block not in older.lacking:
            places.setdefault((known, min(block_bytes, len(older.payload) - at)), at)
    for range_ in _payload(incoming):
        expected = table[range_.offset // block_bytes]
        place = places.get((expected, range_.length))
        if place is not None:
            equal = older.payload[place : place + range_.length]
            incoming.put(range_, equal, expected=expected)


class BlockDedup:
    """Of one node's ranks. Safe from any thread."""

    def __init__(self, slots: OwnSlots, block_bytes: int) -> None:
        self._slots = slots
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._stamp: Stamp | None = None
        self._read: set[int] = set()  # ranks whose table of that stamp is among
        self._places: dict[BlockSum, tuple[int, int]] = {}  # rank and offset

    def take_over(
        self, incoming: IncomingSnapshot, table: tuple[int, ...], ranks: Iterable[int], stamp: Stamp
    ) -> list[BlockRange]:
        """Fill `incoming` from these ranks' own snapshots of that stamp. Returns the payload ranges
        that have to come from elsewhere."""
        places = self._places_of(stamp, ranks)
        # by rank: what is wanted, and where it lies there
        found: dict[int, list[tuple[BlockRange, int]]] = {}
        for range_ in _payload(incoming):
            block = range_.offset // self._block_bytes
            rank, at = places.get((table[block], range_.length), (None, 0))
            if rank is not None:
                found.setdefault(rank, []).append((range_, at))
        for rank, equal in found.items():
            self._copy(incoming, table, rank, stamp, equal)
        return _payload(incoming)

    def _places_of(self, stamp: Stamp, ranks: Iterable[int]) -> Mapping[BlockSum, tuple[int, int]]:
        with self._lock:
            if stamp != self._stamp:
                self._stamp, self._read, self._places = stamp, set(), {}
            for rank in ranks:
                if rank not in self._read:
                    self._read_table(rank, stamp)
            return self._places

    def _read_table(self, rank: int, stamp: Stamp) -> None:
        slot = self._slots.pin(stamp, rank)
        if slot is None:
            return
        try:
            header, lacking = slot.header(), slot.lacking()
            for block, found in enumerate(slot.table(header)):
                if block in lacking:
                    continue  # another of these ranks has it
                at = block * slot.block_bytes
                nbytes = min(slot.block_bytes, header.payload_bytes - at)
                self._places.setdefault((found, nbytes), (rank, at))
            self._read.add(rank)
        except DamageError:
            return  # scrubbing will find it too
        finally:
            self._slots.unpin(slot)

    def _copy(
        self,
        incoming: IncomingSnapshot,
        table: tuple[int, ...],
        rank: int,
        stamp: Stamp,
        equal: list[tuple[BlockRange, int]],
    ) -> None:
        slot = self._slots.pin(stamp, rank)
        if slot is None:
            return
        try:
            payload = slot.part(Part.PAYLOAD, slot.header())
            for range_, at in equal:
                _, offset, nbytes = range_
                if at + nbytes <= len(payload):
                    incoming.put(
                        range_,
                        payload[at : at + nbytes],
                        expected=table[offset // slot.block_bytes],
                    )
        except DamageError:
            return
        finally:
            self._slots.unpin(slot)


def _payload(incoming: IncomingSnapshot) -> list[BlockRange]:
    return [range_ for range_ in incoming.missing() if range_.part is Part.PAYLOAD]
