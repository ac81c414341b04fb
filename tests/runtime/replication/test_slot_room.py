"""Slot room: what everybody relies on is never overwritten, and the owner hears what became of its
offer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.edge.shm.slot import Slot
from keepstep.model.horizon import Horizon
from keepstep.model.messages.peers import CopyDeclined, CopyOffer, CopyUnavailable
from keepstep.model.snapshot import SlotState, Stamp
from keepstep.runtime.replication.holder_replies import HolderReplies
from keepstep.runtime.replication.slot_room import SlotRoom
from tests.runtime.replication.room import JOB_HASH, VERSION, ReplicationRoom, fill

RANK = 1  # on node 1; we are node 0
stamps = st.builds(Stamp, st.integers(0, 3), st.just(1))  # few: they meet each other
views = st.lists(
    st.one_of(st.none(), st.tuples(st.booleans(), stamps)), min_size=2, max_size=2
)  # of each slot: none, or whether it is sealed and its stamp


class Rooms:
    """A slot room over a node's shelf of copies."""

    def __init__(self, **how: int) -> None:
        self.node = ReplicationRoom(**how)
        self.node.join()
        self.shelf = self.node.held.copies
        self.room = SlotRoom(self.node.held, HolderReplies(self.node.links), self.node.journal)
        self.given: list[Slot] = []

    def put(self, index: int, is_sealed: bool, stamp: Stamp) -> Slot:
        slot = self.shelf.take(RANK, index, 64, 64)
        if is_sealed:
            return fill(slot, RANK, stamp, b"x" * 64)
        slot.begin(JOB_HASH, RANK, 3, 0, stamp)
        return slot

    def find(self, stamp: Stamp, floor: Stamp | None = None, capacity: int = 64) -> None:
        offer = CopyOffer(VERSION, RANK, stamp, 8, capacity, 8, 64, 0, (), 0, floor)
        self.room.find(offer, self.shelf, RANK, capacity, 64, self.given.append)


@settings(max_examples=400)
@given(
    views,
    stamps,
    st.none() | stamps,
    st.none() | stamps,
    st.none() | stamps,
    st.frozensets(stamps),
    st.integers(-1, 4),
)
def test_neither_floor_nor_target_is_overwritten_whatever_lies_here(
    lies: list[tuple[bool, Stamp] | None],
    offered: Stamp,
    offered_floor: Stamp | None,
    committed: Stamp | None,
    target: Stamp | None,
    alive: frozenset[Stamp],
    decided_step: int,
) -> None:
    rooms = Rooms()
    sealed: dict[int, Stamp] = {}
    for index, view in enumerate(lies):
        if view is not None:
            rooms.put(index, *view)
            if view[0]:
                sealed[index] = view[1]
    # the leader names its target among what is alive
    alive |= {target} if target is not None else set()
    rooms.room.horizon = Horizon(1, committed, target, alive, decided_step)
    rooms.find(offered, offered_floor)
    rooms.node.settle()
    refused = rooms.node.sent(CopyUnavailable)
    assert len(rooms.given) + len(refused) == 1
    assert [node for node, _ in refused] in ([], [RANK])
    floor = max((f for f in (committed, offered_floor) if f is not None), default=None)
    for slot in rooms.given:
        held = sealed.get(int(slot.path.name.split("-")[1]))
        assert held is None or held != floor
        assert held is None or held != target or (floor is not None and target < floor)
        assert held is None or (floor is not None and held < floor) or held not in alive


@given(views)
def test_what_is_refused_leaves_everything_as_it_was(lies: list[tuple[bool, Stamp] | None]) -> None:
    rooms = Rooms()
    for index, view in enumerate(lies):
        if view is not None:
            rooms.put(index, *view)
    before = rooms.shelf.views(RANK)
    rooms.find(Stamp(7, 1))
    rooms.node.settle()
    if not rooms.given:
        assert rooms.shelf.views(RANK) == before
    assert bool(rooms.given) == any(view.state is not SlotState.SEALED for view in before)


def test_a_slot_that_fits_is_given_at_once_and_a_larger_one_is_made_by_a_worker() -> None:
    rooms = Rooms()
    here = rooms.put(0, False, Stamp(1, 1))
    rooms.find(Stamp(2, 1))
    assert rooms.given == [here]
    rooms.find(Stamp(2, 1), capacity=20_000)
    assert len(rooms.given) == 1
    rooms.find(Stamp(2, 1), capacity=20_000)  # of the same offer, while it is being made
    rooms.node.settle()
    assert len(rooms.given) == 2
    assert rooms.given[1].capacity >= 20_000


def test_where_there_is_no_memory_the_owner_is_told_so() -> None:
    rooms = Rooms(budget_bytes=100_000)
    rooms.find(Stamp(1, 1), capacity=1_000_000)
    rooms.node.settle()
    assert [(node, word.rank) for node, word in rooms.node.sent(CopyDeclined)] == [(RANK, RANK)]
    assert rooms.given == []


@pytest.mark.parametrize(
    "stop", [SlotRoom.end, lambda room: room.keep_only(())], ids=["another mesh", "another policy"]
)
def test_what_is_made_too_late_is_for_nobody(stop: Callable[[SlotRoom], None]) -> None:
    rooms = Rooms()
    rooms.find(Stamp(1, 1))
    stop(rooms.room)
    rooms.node.settle()
    assert rooms.given == []
    rooms.find(Stamp(1, 1))
    rooms.node.settle()
    assert len(rooms.given) == 1
