"""Holder: this node as a keeper of other nodes' snapshots: copies, and parities of stripe groups.

Comes in: offers of owners. Goes out: acceptance, decline (no memory: said once is enough),
acknowledgement when the part is whole and proven here, and a report when it is not, or no longer.
What rests here outlives the mesh (`held.py`); what is on its way does not.
"""

from __future__ import annotations

from pathlib import Path

from keepstep.model.horizon import Horizon
from keepstep.model.messages.peers import CopyOffer
from keepstep.model.snapshot import Stamp
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.copy_holder import CopyHolder
from keepstep.runtime.replication.held import HeldSnapshots
from keepstep.runtime.replication.holder_replies import HolderReplies
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.parity_holder import OwnSizes, ParityHolder
from keepstep.runtime.replication.slot_room import SlotRoom


class Holder:
    """Of one mesh."""

    def __init__(
        self,
        world: KeeperWorld,
        links: MeshLinks,
        held: HeldSnapshots,
        job_hash: bytes,
        own_sizes: OwnSizes,
    ) -> None:
        """`own_sizes(rank, stamp)`: of a snapshot of this node's own ranks, None when it is not
        sealed here."""
        self._journal, self._held = world.journal, held
        self._replies = replies = HolderReplies(links)
        self._room = room = SlotRoom(held, replies, world.journal)
        self._copies = CopyHolder(world, links, held, room, replies, job_hash)
        self._parities = ParityHolder(world, links, held, room, replies, job_hash, own_sizes)

    def offered(self, offer: CopyOffer) -> None:
        """An owner wants something of its rank's snapshot kept here."""
        if offer.stripe_group:
            self._parities.offered(offer)
        else:
            self._copies.offered(offer)

    def follow(self, horizon: Horizon) -> None:
        """The newest horizon heard of."""
        self._room.horizon = horizon

    def target(self, stamp: Stamp) -> None:
        """All protect that stamp now."""
        self._parities.try_groups(stamp)

    def keep_only(self, copies: set[int], parities: set[int]) -> None:
        """Of these ranks; what is held or on its way of others is given up."""
        self._copies.keep_only(copies)
        self._parities.keep_only(parities)
        kept = {(self._held.copies, rank) for rank in copies}
        kept |= {(self._held.parities, rank) for rank in parities}
        self._room.keep_only(kept)
        self._held.keep_only(copies, parities)

    def damaged_at_rest(self, path: Path, why: str) -> None:
        """Scrubbing found a copy or a parity that no longer proves: give it up, and have its owners
        send it again."""
        held = self._held
        is_copy = path.is_relative_to(held.copies.root)
        found = (held.copies if is_copy else held.parities).void_damaged(path)
        if found is None:
            return  # overwritten meanwhile
        rank, stamp = found
        self._journal.record("damaged", f"scrub: {why}; asking its owner for it again", rank=rank)
        members = held.members_of(rank, stamp)
        owners = [rank] if is_copy else [member for member in members if member != rank]
        for owner in owners:
            self._replies.damaged_at_rest(owner, stamp, why)

    def link_is_dead(self, node: int) -> None:
        """Nothing comes from there any more."""
        self._copies.link_is_dead(node)

    def end(self) -> None:
        """Another mesh begins: whatever is on its way counts no more."""
        self._copies.end()
        self._parities.end()
        self._room.end()
