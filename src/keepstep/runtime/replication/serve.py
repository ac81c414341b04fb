"""Supplier: sends what other nodes ask for to restore: from own slots, copies, parities, and the
small parts kept beside parities.

Nothing is verified here beforehand: every block goes out with the checksum its table names, so a
damaged one cannot arrive as a good one; the asker hears of it and asks elsewhere.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.coding.checksum import BLOCK_BYTES, checksum
from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.messages.peers import CopyUnavailable
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.ports import Memory
from keepstep.runtime.replication.holder import Holder
from keepstep.runtime.replication.peer_inbox import BlockTaker, PeerInbox
from keepstep.runtime.slot_locks import pin_one

META = (Part.HEADER, Part.TABLE, Part.MANIFEST)


@dataclass
class Order:
    """What one asker wants of one snapshot."""

    node: int
    rank: int
    stamp: Stamp
    waiting: deque[BlockRange] = field(default_factory=deque)
    life: int = 0  # of the supplier, when it was given


class Supplier:
    def __init__(self, memory: Memory, lines: PeerInbox, job_dir: Path, holder: Holder) -> None:
        self._memory, self._lines, self._job_dir, self._holder = memory, lines, job_dir, holder
        self._orders: list[Order] = []
        self._life = 0
        self._pins: dict[tuple[int, Stamp], Slot] = {}

    def end(self) -> None:
        """Everybody has what it needs, or another round has begun: slots may be overwritten
        again."""
        self._life += 1
        self._orders.clear()
        for slot in self._pins.values():
            slot.unlock()  # closing alone would not: a thread may still look at the map
            slot.close()
        self._pins.clear()

    def asked(self, node: int, rank: int, stamp: Stamp, ranges: tuple[BlockRange, ...]) -> None:
        order = Order(node, rank, stamp, deque(ranges), self._life)
        self._orders.append(order)
        self._pump(order)

    def writable(self, node: int) -> None:
        for order in [o for o in self._orders if o.node == node]:
            self._pump(order)

    def _pump(self, order: Order) -> None:
        try:
            while order.waiting:
                part, offset, length = order.waiting[0]
                source, known = self._find(order.rank, order.stamp, part, offset, length)
                span = Span(order.rank, order.stamp, part, offset, length)
                if not self._send(order, span, source, known):
                    return
                order.waiting.popleft()
        except (DamageError, LookupError) as error:
            self._refuse(order, str(error))
        if order in self._orders:
            self._orders.remove(order)

    def _send(self, order: Order, span: Span, source: memoryview, known: int | None) -> bool:
        def done(why: str | None) -> None:
            # What is not wanted came another way, or was asked for in a round before: that is no
            # failure.
            if why is not None and "damaged" in why:
                self._lines.call_in_loop(lambda: self._refuse(order, f"{span}: {why}"))

        return self._lines.send_block(order.node, span, source, done, known)

    def _refuse(self, order: Order, why: str) -> None:
        order.waiting.clear()
        if order.life != self._life:
            # of a round before, or everybody has what it needs: an asker of today would take it for
            # an answer
            return
        version = self._lines.mesh_version
        self._lines.send(order.node, CopyUnavailable(version, order.rank, order.stamp, why[:1000]))

    def _find(
        self, rank: int, stamp: Stamp, part: Part, offset: int, length: int
    ) -> tuple[memoryview, int | None]:
        """The bytes, and their checksum where a table names it. Raises LookupError, DamageError."""
        if part is Part.PARITY:
            slot = self._holder.parities.find(rank, stamp)
            if slot is None:
                raise LookupError(f"no parity of rank {rank} at {stamp} rests here")
            return _within(slot.payload[: slot.header().payload_bytes], offset, length), None
        slot = self._snapshot(rank, stamp)
        if slot is not None:
            header = slot.header()
            data = _within(slot.part(part, header), offset, length)
            whole_block = (
                part is Part.PAYLOAD
                and offset % BLOCK_BYTES == 0
                and length == min(BLOCK_BYTES, header.payload_bytes - offset)
            )
            return data, slot.table(header)[offset // BLOCK_BYTES] if whole_block else None
        if part in META:
            for (mine, at), beside in self._holder.parities.sealed().items():
                contents = self._holder.contents(mine, at, beside)
                if at == stamp and rank in contents.metas:
                    start, nbytes = contents.where(rank, part)
                    return _within(beside.payload[start : start + nbytes], offset, length), None
        raise LookupError(f"{part.name.lower()} of rank {rank} at {stamp} is not here")

    def _snapshot(self, rank: int, stamp: Stamp) -> Slot | None:
        if (rank, stamp) not in self._pins:
            slot = pin_one(self._memory, self._job_dir, stamp, rank)
            if slot is None:
                return self._holder.copies.find(rank, stamp)
            self._pins[(rank, stamp)] = slot
        return self._pins[(rank, stamp)]

    def copy_here(
        self, rank: int, stamp: Stamp, range_: BlockRange, taker: BlockTaker, node: int
    ) -> None:
        """The asker is this node itself: no link is needed. Raises LookupError, DamageError."""
        part, offset, length = range_
        source, _ = self._find(rank, stamp, part, offset, length)
        span = Span(rank, stamp, part, offset, length)
        place = taker.place(node, span)
        if place is not None:
            place[:] = source
            taker.arrived(node, span, checksum(place))


def _within(data: memoryview, offset: int, length: int) -> memoryview:
    if offset + length > len(data):
        raise LookupError(
            f"expected a range within {len(data)} bytes, found {offset} to {offset + length}"
        )
    return data[offset : offset + length]
