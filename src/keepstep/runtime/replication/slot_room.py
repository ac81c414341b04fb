"""Slot room: where on this node an offered snapshot goes.

Comes in: offers, and the newest horizon heard of. Goes out: a slot that may be overwritten, or the
word to the owner that there is none. Which one is overwritten is decided by the same rule as a
rank's own (`core/resume/slots.py`), so that the newest committed generation stays whole whatever
arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from keepstep.core.resume.slots import Skip, choose
from keepstep.edge.shm.slot import Slot
from keepstep.edge.shm.slot_store import Shelf
from keepstep.errors import MemoryBudgetError
from keepstep.model.horizon import Horizon
from keepstep.model.messages.peers import CopyOffer
from keepstep.model.snapshot import SlotState
from keepstep.model.units import human_bytes
from keepstep.ports import Journal
from keepstep.runtime.replication.held import HeldSnapshots
from keepstep.runtime.replication.holder_replies import HolderReplies


class SlotRoom:
    """Of one mesh."""

    def __init__(self, held: HeldSnapshots, replies: HolderReplies, journal: Journal) -> None:
        self._held, self._replies, self._journal = held, replies, journal
        self.horizon = Horizon(-1)
        # for whom a slot is being made
        self._wanted: dict[tuple[Shelf, int], CopyOffer] = {}

    def find(
        self,
        offer: CopyOffer,
        shelf: Shelf,
        rank: int,
        capacity: int,
        manifest_capacity: int,
        then: Callable[[Slot], None],
        lacking: frozenset[int] = frozenset(),
    ) -> None:
        """A slot of `rank` on that shelf, with at least these capacities in bytes and memory for
        all blocks but those `lacking`; `then` gets it, at once or when it is made. While one is
        being made there already nothing happens: the owner asks again."""
        if self._held.is_making(shelf, rank):
            return
        index = self._choose(shelf, rank, offer)
        if index is None:
            return
        fitting = shelf.fitting(rank, index, capacity, manifest_capacity, lacking)
        if fitting is not None:
            then(fitting)
            return
        self._wanted[(shelf, rank)] = offer

        def make() -> Slot | MemoryBudgetError:
            try:
                return shelf.take(rank, index, capacity, manifest_capacity, lacking)
            except MemoryBudgetError as error:
                return error

        def made(found: Slot | MemoryBudgetError) -> None:
            if self._wanted.pop((shelf, rank), None) is not offer:
                return  # another mesh has begun, or another policy
            if isinstance(found, MemoryBudgetError):
                self._decline(offer, capacity, found)
            else:
                then(found)

        self._held.make(shelf, rank, make, made)

    def _choose(self, shelf: Shelf, rank: int, offer: CopyOffer) -> int | None:
        horizon = self.horizon
        floors = [floor for floor in (offer.floor, horizon.floor) if floor is not None]
        # What was half written is given up by now: an owner sends one snapshot at a time.
        views = [
            view._replace(state=SlotState.EMPTY) if view.state is SlotState.WRITING else view
            for view in shelf.views(rank)
        ]
        floor = max(floors, default=None)
        decision = choose(views, floor, horizon.is_hopeless)
        if isinstance(decision, Skip):
            self._replies.refuse(offer, f"no slot is free here: {decision.why}")
            return None
        return decision.slot

    def _decline(self, offer: CopyOffer, capacity: int, error: MemoryBudgetError) -> None:
        owner = self._replies.owner_of(offer)
        why = f"node {owner} asks for {human_bytes(capacity)} here: {error}"
        self._journal.record("declined", why, rank=offer.rank)
        self._replies.decline(offer, str(error))

    def keep_only(self, kept: Collection[tuple[Shelf, int]]) -> None:
        """Slots that are being made for other ranks are not needed any more."""
        self._wanted = {key: offer for key, offer in self._wanted.items() if key in kept}

    def end(self) -> None:
        """Another mesh begins: slots that are being made are not needed any more."""
        self._wanted.clear()
