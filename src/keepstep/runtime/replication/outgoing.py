"""Outgoing: one snapshot of an own rank on its way to its holders.

Comes in: the holders' answers. Goes out: offers, and blocks straight from the sealed slot, which
stands still until the last of them is over. A copy's payload follows when the holder has seen in
the table which blocks of it are new to it; a member of a stripe group sends its pieces once it
knows how large the others are. A bit that flipped at rest must not get into a parity: a piece goes
with the checksum that the table names, which its holder proves as it arrives; where the pieces are
no blocks of the table, the whole slot is proven first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.core.redundancy.protection import Assignment
from keepstep.model.kept import kept_of
from keepstep.model.messages.peers import CopyOffer
from keepstep.model.shares import blocks_of
from keepstep.model.snapshot import SlotHeader, Stamp
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.ports import Clock
from keepstep.runtime.replication.encode import SnapshotSizes, ranges_for, sizes_of_header
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.receive import meta_ranges_of
from keepstep.runtime.slot_locks import Pin


@dataclass
class Delivery:
    """One holder's part: what is still to be handed to its link, and when it last gave a sign.
    `filled`: all that is not asked for is among it."""

    node: int
    waiting: deque[BlockRange] = field(default_factory=deque)
    accepted: bool = False
    filled: bool = False
    acked: bool = False
    sign_ns: int = 0


class OutgoingSnapshot:
    """Pinned until `end`. `on_damage`, in the loop: it does not arrive whole, and why."""

    def __init__(
        self,
        links: MeshLinks,
        clock: Clock,
        assignment: Assignment,
        stamp: Stamp,
        pin: Pin,
        header: SlotHeader,
        table: tuple[int, ...],
        on_damage: Callable[[OutgoingSnapshot, str], None],
    ) -> None:
        self._links, self._clock, self._on_damage = links, clock, on_damage
        self.assignment, self.stamp, self.header = assignment, stamp, header
        self._slot, self._table, self._pin = pin.slot, table, pin
        self._lacking = blocks_of(header.lacking)
        self._kept = kept_of(header.payload_bytes, pin.slot.block_bytes, header.lacking)
        self._sizes = {assignment.rank: sizes_of_header(header, pin.slot.block_bytes)}
        self._is_proven = not assignment.stripe_group
        self._is_over = False
        self.deliveries = {node: Delivery(node) for node in assignment.holders}

    @property
    def is_moving(self) -> bool:
        """Whether any block of it is on its way."""
        return self._pin.users > (0 if self._is_over else 1)

    @property
    def is_acked(self) -> bool:
        """Whether all holders have their part, and have proven it."""
        return all(delivery.acked for delivery in self.deliveries.values())

    @property
    def path(self) -> Path:
        """Of its slot."""
        return self._slot.path

    def verify_header(self) -> None:
        """Raises DamageError when the slot's header is not what it was: holders refuse a damaged
        one, as often as it is sent."""
        self._slot.header()

    def end(self) -> None:
        """It is over: the rank may write there again, once no block is on its way any more."""
        self._is_over = True
        self._pin.let_go()

    # -- what is known of it

    def knows_size(self, rank: int, sizes: SnapshotSizes) -> None:
        """Of the snapshot of another member of the stripe group."""
        self._sizes[rank] = sizes

    def announced(self, rank: int, sizes: SnapshotSizes) -> None:
        """As `knows_size`, and perhaps the last that was missing."""
        self.knows_size(rank, sizes)
        self._fill_all()

    def proven(self) -> None:
        """The slot has been verified."""
        self._is_proven = True
        self._fill_all()

    @property
    def is_proof_needed(self) -> bool:
        """All sizes are known, and of some pieces there is no checksum in the table by which their
        holder could see that a bit has flipped at rest: the slot has to be verified first."""
        if self._is_proven or len(self._sizes) < len(self.assignment.stripe_group):
            return False
        return any(
            range_.part is Part.PAYLOAD and self._checksum_of(*range_) is None
            for node in self.deliveries
            for range_ in self._pieces_for(node)
        )

    # -- one holder

    def offer(self, delivery: Delivery, floor: Stamp | None) -> None:
        """Ask the holder to take it; whatever it had begun to take is begun anew."""
        delivery.sign_ns = self._clock.monotonic_ns()
        delivery.waiting.clear()
        delivery.accepted = delivery.filled = False
        header, assignment = self.header, self.assignment
        offer = CopyOffer(
            mesh_version=self._links.version,
            rank=assignment.rank,
            stamp=self.stamp,
            payload_bytes=header.payload_bytes,
            capacity_bytes=self._slot.capacity,
            manifest_bytes=header.manifest_bytes,
            manifest_capacity_bytes=self._slot.manifest_capacity,
            table_checksum=header.table_checksum,
            stripe_group=assignment.stripe_group,
            tolerates=assignment.tolerates,
            floor=floor,
            lacking=header.lacking.hex(),
        )
        self._links.say(delivery.node, offer)

    def accepted(self, delivery: Delivery) -> None:
        """The holder is ready, or ready anew: then everything is sent again."""
        delivery.accepted = True
        delivery.filled = delivery.acked = False
        delivery.sign_ns = self._clock.monotonic_ns()
        delivery.waiting.clear()
        self._fill(delivery)

    def wanted(self, delivery: Delivery, ranges: tuple[BlockRange, ...]) -> bool:
        """The holder asks for blocks of the payload; False when it was not sent the rest yet."""
        if not delivery.filled:
            return False
        delivery.waiting.extend(wanted for wanted in ranges if self._is_here(wanted))
        self.pump(delivery)
        return True

    def _is_here(self, wanted: BlockRange) -> bool:
        part, offset, length = wanted
        size, end = self._slot.block_bytes, offset + length
        is_within = part is Part.PAYLOAD and end <= self.header.payload_bytes
        return is_within and self._lacking.isdisjoint(range(offset // size, -(-end // size)))

    def refused(self, delivery: Delivery) -> None:
        """The holder has not got it whole. It is asked again when it has given no sign for a
        while."""
        delivery.acked = delivery.accepted = False
        delivery.sign_ns = self._clock.monotonic_ns()

    def _fill_all(self) -> None:
        for delivery in self.deliveries.values():
            self._fill(delivery)

    def _fill(self, delivery: Delivery) -> None:
        if not delivery.accepted or delivery.filled:
            return
        group, sizes = self.assignment.stripe_group, self._sizes
        if not group:
            header = self.header
            block_bytes = self._slot.block_bytes
            delivery.waiting.extend(
                meta_ranges_of(header.payload_bytes, header.manifest_bytes, block_bytes)
            )
        elif len(sizes) == len(group) and not self.is_proof_needed:
            delivery.waiting.extend(self._pieces_for(delivery.node))
        else:
            return
        delivery.filled = True
        self.pump(delivery)

    def _pieces_for(self, node: int) -> list[BlockRange]:
        """What goes into the parity that the group's member on that node keeps."""
        assignment, sizes = self.assignment, self._sizes
        node_of = self._links.mesh.node_of
        kept_bytes = {rank: known.kept_bytes for rank, known in sizes.items()}
        stripes = assignment.stripes(kept_bytes, self._slot.block_bytes)
        keeper = next(rank for rank in assignment.stripe_group if node_of[rank] == node)
        return ranges_for(stripes, sizes[assignment.rank], assignment.rank, keeper)

    def pump(self, delivery: Delivery) -> None:
        """Hand the link what it takes. When it takes no more, somebody says when it does again."""
        while delivery.waiting:
            part, offset, length = delivery.waiting[0]
            source = self._bytes_of(part, offset, length)
            span = Span(self.assignment.rank, self.stamp, part, offset, length)
            self._pin.take()
            checksum = self._checksum_of(part, offset, length)
            done = self._on_done(delivery)
            if not self._links.send_block(delivery.node, span, source, done, checksum):
                self._pin.let_go()
                return
            delivery.waiting.popleft()

    def _bytes_of(self, part: Part, offset: int, length: int) -> memoryview:
        if self.assignment.stripe_group and part is Part.PAYLOAD:
            return self._slot.kept(self._kept, offset, length)
        return self._slot.part(part, self.header)[offset : offset + length]

    def _checksum_of(self, part: Part, offset: int, length: int) -> int | None:
        """Of a whole block of the payload, as the table names it."""
        if self.assignment.stripe_group and part is Part.PAYLOAD:
            block = self._kept.block_at(offset, length)
            return None if block is None else self._table[block]
        block_bytes = self._slot.block_bytes
        is_whole = length == min(block_bytes, self.header.payload_bytes - offset)
        if part is Part.PAYLOAD and offset % block_bytes == 0 and is_whole:
            return self._table[offset // block_bytes]
        return None

    def _on_done(self, delivery: Delivery) -> Callable[[str | None], None]:
        def on_links_thread(why: str | None) -> None:
            delivery.sign_ns = self._clock.monotonic_ns()
            # and no more: waking the loop for each block costs more than the block's own work
            self._pin.let_go()
            if why is not None and "damaged" in why:
                self._links.call_in_loop(lambda: self._on_damage(self, why))

        return on_links_thread
