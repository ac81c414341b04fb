"""Parity holder: the parities that this node's ranks keep for their stripe groups, on their way
into being.

Comes in: offers of the other members' owners, and the pieces that they send. Goes out: acceptance
once all of a group have offered, and the acknowledgement to all of them once the parity is whole.
Everything but blocks happens in the keeper's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.messages.peers import CopyOffer
from keepstep.model.snapshot import Stamp
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.encode import (
    Encoding,
    ParityContents,
    SnapshotSizes,
    contents_of,
    sizes_of_offer,
)
from keepstep.runtime.replication.held import HeldSnapshots
from keepstep.runtime.replication.holder_replies import HolderReplies
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.slot_room import SlotRoom

# of a snapshot of this node's own ranks; None when it is not sealed here
OwnSizes = Callable[[int, Stamp], SnapshotSizes | None]


class ParityHolder:
    """Of one mesh."""

    def __init__(
        self,
        world: KeeperWorld,
        links: MeshLinks,
        held: HeldSnapshots,
        room: SlotRoom,
        replies: HolderReplies,
        job_hash: bytes,
        own_sizes: OwnSizes,
    ) -> None:
        self._world, self._links, self._held = world, links, held
        self._room, self._replies, self._job_hash = room, replies, job_hash
        self._own_sizes = own_sizes
        self._encoding: dict[int, Encoding] = {}  # by this node's member of the group
        self._offers: dict[tuple[int, Stamp], CopyOffer] = {}  # of groups not complete yet

    def offered(self, offer: CopyOffer) -> None:
        """The owner of a member wants its snapshot added to the parity that is kept here."""
        mine = self._member_here(offer.stripe_group)
        slot = self._held.parities.find(mine, offer.stamp)
        if slot is not None:
            if self._is_of(self._held.contents(mine, offer.stamp, slot), offer):
                self._replies.acknowledge(offer)
                return
            slot.void()
        self._offers = {
            key: known
            for key, known in self._offers.items()
            if known.stripe_group != offer.stripe_group or known.stamp == offer.stamp
        }
        self._offers[(offer.rank, offer.stamp)] = offer
        encoding = self._encoding.get(mine)
        if encoding is not None and encoding.stamp == offer.stamp:
            # the owner begins anew, and what it has sent cannot be taken out again
            self._stop(mine)
        self.try_groups(offer.stamp)

    def _member_here(self, group: tuple[int, ...]) -> int:
        mesh = self._links.mesh
        return next(rank for rank in group if mesh.node_of[rank] == mesh.node)

    def _is_of(self, contents: ParityContents, offer: CopyOffer) -> bool:
        """Whether a parity that rests here is of the snapshot that is offered."""
        return contents.stripes.members == offer.stripe_group and contents.metas[offer.rank][
            1
        ] == self._sizes_of(offer)

    def _sizes_of(self, offer: CopyOffer) -> SnapshotSizes:
        return sizes_of_offer(offer, self._world.memory.block_bytes)

    def try_groups(self, stamp: Stamp) -> None:
        """Begin the parities whose other members have all offered."""
        groups = {offer.stripe_group for (_, s), offer in self._offers.items() if s == stamp}
        for group in sorted(groups):
            mine = self._member_here(group)
            offers = {rank: self._offers.get((rank, stamp)) for rank in group if rank != mine}
            own = self._own_sizes(mine, stamp)
            if own is None or None in offers.values():
                continue
            known = {rank: offer for rank, offer in offers.items() if offer is not None}
            sizes = {rank: self._sizes_of(offer) for rank, offer in known.items()}
            tolerates = next(iter(known.values())).tolerates
            contents = contents_of({**sizes, mine: own}, group, tolerates, mine)
            self._begin(mine, contents, list(known.values()))

    def _begin(self, mine: int, contents: ParityContents, offers: list[CopyOffer]) -> None:
        stamp = offers[0].stamp
        before = self._encoding.get(mine)
        if before is not None and before.stamp == stamp:
            return
        self._stop(mine)
        manifest_bytes = len(contents.to_text())
        self._room.find(
            offers[0],
            self._held.parities,
            mine,
            contents.nbytes,
            manifest_bytes + manifest_bytes // 4,
            lambda slot: self._encode(mine, contents, offers, slot),
            contents.beyond,
        )

    def _encode(
        self, mine: int, contents: ParityContents, offers: list[CopyOffer], slot: Slot
    ) -> None:
        stamp = offers[0].stamp
        slot.begin(self._job_hash, mine, self._links.mesh.world_size, 0, stamp)
        slot.shed(contents.beyond.intersection(range(-(-slot.capacity // slot.block_bytes))))

        def on_whole() -> None:
            self._links.call_in_loop(lambda: self._encoded(mine, encoding, offers))

        encoding = Encoding(slot, contents, mine, stamp, on_whole)
        self._encoding[mine] = encoding
        for rank in encoding.ranks:
            self._links.expect(rank, stamp, encoding)
        for offer in offers:
            self._replies.accept(offer)

    def _encoded(self, mine: int, encoding: Encoding, offers: list[CopyOffer]) -> None:
        if self._encoding.get(mine) is not encoding:
            return
        del self._encoding[mine]
        self._links.expect_no_more(encoding)
        try:
            encoding.seal(self._world.clock.wall_ns())
        except DamageError as error:  # a bit flipped in the slot's header while the pieces came
            encoding.slot.void()
            why = f"the parity of rank {mine} at {encoding.stamp} is not kept: {error}"
            self._world.journal.record("copy-refused", why, rank=mine)
            for offer in offers:
                self._replies.refuse(offer, str(error))
            return
        self._held.remember(mine, encoding.stamp, encoding.contents)
        for offer in offers:
            self._offers.pop((offer.rank, offer.stamp), None)
            self._replies.acknowledge(offer)

    def keep_only(self, ranks: Collection[int]) -> None:
        """What is on its way for other members counts no more."""
        for rank in [r for r in self._encoding if r not in ranks]:
            self._stop(rank)

    def _stop(self, mine: int) -> None:
        encoding = self._encoding.pop(mine, None)
        if encoding is not None:
            self._links.expect_no_more(encoding)
            encoding.stop()
            encoding.slot.void()

    def end(self) -> None:
        """Another mesh begins: whatever is on its way counts no more."""
        for mine in list(self._encoding):
            self._stop(mine)
