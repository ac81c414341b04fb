"""Copy holder: copies of other nodes' snapshots on their way to this node.

Comes in: offers of owners, and the blocks that they send. Goes out: acceptance, requests for what
is missing, and the acknowledgement once the copy is whole and proven. Table, manifest and header
come first; then what the older copy or this node's own ranks have too is taken from there, and the
rest is asked for. Everything but blocks happens in the keeper's loop.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import NamedTuple

from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.messages.peers import CopyOffer
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MIB
from keepstep.model.wire import BlockRange
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.dedup import OlderCopy, older_copy, take_unchanged
from keepstep.runtime.replication.held import HeldSnapshots
from keepstep.runtime.replication.holder_replies import HolderReplies
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.receive import (
    IncomingSnapshot,
    copy_ranges_of,
    in_runs,
    make_holes,
)
from keepstep.runtime.replication.slot_room import SlotRoom

BATCH_BYTES = 64 * MIB  # of payload, compared in one go


class _Arrived(NamedTuple):
    """A snapshot whose table is here. `older`: the newest copy of that rank that rests here."""

    offer: CopyOffer
    incoming: IncomingSnapshot
    older: OlderCopy | None


class _Batch:
    """Snapshots that are compared in one go. Their tables come together, for ranks of a node seal
    together; what follows of small ones goes out together too. Large ones have a worker each."""

    def __init__(self, *arrived: _Arrived) -> None:
        self._lock = threading.Lock()
        self._waiting = list(arrived)
        self._is_over = not arrived

    def join(self, arrived: _Arrived) -> bool:
        """Whether it is compared with these; not when they are being compared, or are many
        bytes."""
        with self._lock:
            nbytes = sum([one.offer.payload_bytes for one in (*self._waiting, arrived)])
            is_taken = not self._is_over and nbytes <= BATCH_BYTES
            if is_taken:
                self._waiting.append(arrived)
            return is_taken

    def take(self) -> list[_Arrived]:
        """All of them; nothing joins them any more. From any thread."""
        with self._lock:
            self._is_over = True
            return self._waiting


class CopyHolder:
    """Of one mesh."""

    def __init__(
        self,
        world: KeeperWorld,
        links: MeshLinks,
        held: HeldSnapshots,
        room: SlotRoom,
        replies: HolderReplies,
        job_hash: bytes,
    ) -> None:
        self._world, self._links, self._held = world, links, held
        self._room, self._replies, self._job_hash = room, replies, job_hash
        self._receiving: dict[int, IncomingSnapshot] = {}  # by rank: one snapshot at a time
        # of those, which are being filled from what this node has itself
        self._comparing: dict[int, Stamp] = {}
        self._batch = _Batch()

    def offered(self, offer: CopyOffer) -> None:
        """An owner wants a copy of its rank's snapshot kept here."""
        slot = self._held.copies.find(offer.rank, offer.stamp)
        if slot is not None and slot.header().table_checksum == offer.table_checksum:
            self._replies.acknowledge(offer)
            return
        # two computations of one stamp cannot be: one of the two is damaged, and the owner has just
        # proven its own
        if slot is not None:
            slot.void()
        if self._comparing.get(offer.rank) == offer.stamp:
            return  # its table is here, and what is missing will be asked for
        self._stop(offer.rank)
        self._room.find(
            offer,
            self._held.copies,
            offer.rank,
            offer.capacity_bytes,
            offer.manifest_capacity_bytes,
            lambda found: self._receive(offer, found),
            offer.lacks,
        )

    def _receive(self, offer: CopyOffer, slot: Slot) -> None:
        world_size = self._links.mesh.world_size
        slot.begin(self._job_hash, offer.rank, world_size, 0, offer.stamp)
        lacking = offer.lacks
        try:
            make_holes(slot, offer.payload_bytes, lacking)
        except DamageError as error:
            self._replies.refuse(offer, str(error))
            return
        incoming = IncomingSnapshot(
            slot,
            offer.rank,
            offer.stamp,
            offer.payload_bytes,
            offer.manifest_bytes,
            copy_ranges_of(offer.payload_bytes, offer.manifest_bytes, slot.block_bytes, lacking),
            on_whole=lambda: self._links.call_in_loop(lambda: self._arrived(offer, incoming)),
            on_table=lambda: self._links.call_in_loop(lambda: self._compare(offer, incoming)),
            lacking=lacking,
        )
        self._receiving[offer.rank] = incoming
        self._links.expect(offer.rank, offer.stamp, incoming)
        self._replies.accept(offer)

    def _compare(self, offer: CopyOffer, incoming: IncomingSnapshot) -> None:
        """The table is here: what the older copy or this node's own ranks have too is taken from
        there, the rest is asked for."""
        if self._receiving.get(offer.rank) is not incoming:
            return
        self._comparing[offer.rank] = offer.stamp
        incoming.work(True)
        arrived = _Arrived(offer, incoming, older_copy(self._held.copies.of(offer.rank)))
        if not self._batch.join(arrived):
            self._batch = batch = _Batch(arrived)
            self._world.workers.submit(lambda: self._take_over(batch), self._ask)

    def _take_over(self, batch: _Batch) -> list[tuple[_Arrived, list[BlockRange]]]:
        """Beside the loop: from older copies and this node's own ranks. What is missing then of
        each."""
        mesh = self._links.mesh
        own_ranks = mesh.ranks_of(mesh.node)
        found = []
        for one in batch.take():
            table = one.incoming.table()
            if one.older is not None:
                take_unchanged(one.incoming, table, one.older)
            stamp = one.offer.stamp
            missing = self._held.dedup.take_over(one.incoming, table, own_ranks, stamp)
            found.append((one, missing))
        return found

    def _ask(self, found: list[tuple[_Arrived, list[BlockRange]]]) -> None:
        with self._links.gathering():
            for (offer, incoming, _), missing in found:
                incoming.work(False)
                if self._receiving.get(offer.rank) is incoming:
                    del self._comparing[offer.rank]
                    for ranges in in_runs(missing):
                        self._replies.fetch(offer, ranges)

    def _arrived(self, offer: CopyOffer, incoming: IncomingSnapshot) -> None:
        if self._receiving.get(offer.rank) is not incoming:
            return
        del self._receiving[offer.rank]
        # all of it may have been here: then it is whole before the answer of `_compare` comes
        self._comparing.pop(offer.rank, None)
        self._links.expect_no_more(incoming)
        try:
            incoming.seal(self._job_hash)
        except DamageError as error:
            incoming.slot.void()
            why = f"the copy of rank {offer.rank} at {offer.stamp} is not kept: {error}"
            self._world.journal.record("copy-refused", why, rank=offer.rank)
            self._replies.refuse(offer, str(error))
            return
        self._replies.acknowledge(offer)

    def link_is_dead(self, node: int) -> None:
        """Nothing comes from there any more."""
        for incoming in self._receiving.values():
            incoming.link_is_gone(node)

    def keep_only(self, ranks: Collection[int]) -> None:
        """What is on its way of other ranks counts no more."""
        for rank in [r for r in self._receiving if r not in ranks]:
            self._stop(rank)

    def _stop(self, rank: int) -> None:
        incoming = self._receiving.pop(rank, None)
        self._comparing.pop(rank, None)
        if incoming is None:
            return
        self._links.expect_no_more(incoming)
        if incoming.in_use:
            self._held.copies.retire(incoming.slot)
        else:
            incoming.slot.void()

    def end(self) -> None:
        """Another mesh begins: whatever is on its way counts no more."""
        for rank in list(self._receiving):
            self._stop(rank)
