"""Holder replies: what a holder says to the owner of a snapshot."""

from __future__ import annotations

from keepstep.model.messages.peers import (
    CopyAccepted,
    CopyAcked,
    CopyDeclined,
    CopyOffer,
    CopyUnavailable,
    FetchRanges,
    SnapshotMessage,
)
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import BlockRange
from keepstep.runtime.replication.mesh_links import MeshLinks


class HolderReplies:
    """Of one mesh. Each goes to the node on which the snapshot's rank lives."""

    def __init__(self, links: MeshLinks) -> None:
        self._links, self._version = links, links.version

    def owner_of(self, offer: CopyOffer) -> int:
        """The node that made the offer."""
        return self._links.mesh.node_of[offer.rank]

    def _send(self, message: SnapshotMessage) -> None:
        self._links.say(self._links.mesh.node_of[message.rank], message)

    def accept(self, offer: CopyOffer) -> None:
        """Send it."""
        self._send(CopyAccepted(self._version, offer.rank, offer.stamp))

    def acknowledge(self, offer: CopyOffer) -> None:
        """It is here, whole and proven."""
        self._send(CopyAcked(self._version, offer.rank, offer.stamp))

    def refuse(self, offer: CopyOffer, why: str) -> None:
        """It is not here, or not whole. The owner asks again."""
        self._send(CopyUnavailable(self._version, offer.rank, offer.stamp, why))

    def decline(self, offer: CopyOffer, why: str) -> None:
        """There is no memory for it."""
        self._send(CopyDeclined(self._version, offer.rank, offer.stamp, why))

    def fetch(self, offer: CopyOffer, ranges: tuple[BlockRange, ...]) -> None:
        """Send these parts of it."""
        self._send(FetchRanges(self._version, offer.rank, offer.stamp, ranges))

    def damaged_at_rest(self, rank: int, stamp: Stamp, why: str) -> None:
        """What rested here of that snapshot does not prove any more. It may be a rank's of a larger
        world before: then there is nobody to tell."""
        if rank in self._links.mesh.node_of:
            self._send(CopyUnavailable(self._version, rank, stamp, f"damaged at rest: {why}"))
