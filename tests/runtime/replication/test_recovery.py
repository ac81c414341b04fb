"""Recovery: snapshots are fetched from those who have told that they hold them, and what arrives is
what lay there."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.redundancy.protection import assignments
from keepstep.edge.shm.slot import Slot, slot_paths
from keepstep.model.messages.peers import FetchRanges
from keepstep.model.restore_sources import GroupMember, HeldSnapshot, Inventory, RestoreSource
from keepstep.model.snapshot import Stamp
from keepstep.model.topology import parse_policy
from keepstep.runtime.replication.owner import Owner
from keepstep.runtime.replication.recovery import SnapshotRecovery
from keepstep.runtime.replication.repair_sums import RepairSums
from keepstep.runtime.replication.serve import SnapshotServer
from tests.runtime.replication.room import BLOCK_BYTES, JOB_HASH, ReplicationRoom, payload_of

NODES = 4
STAMP = Stamp(5, 1)
PAYLOAD = random.Random(6).randbytes(7 * BLOCK_BYTES + 10)
FROM_TWO = RestoreSource(0, copies=(1, 2))


class Recovering:
    """Node 0 of four, and what lies elsewhere of its rank."""

    def __init__(self, here: int = 0) -> None:
        self.room = room = ReplicationRoom(here, NODES)
        room.links.open(())
        elsewhere = room.job_dir.with_name("elsewhere")
        self.source = room.seal(0, STAMP, PAYLOAD, root=elsewhere)
        self.other = room.seal(0, Stamp(6, 1), PAYLOAD, 1, root=elsewhere)
        server = SnapshotServer(room.links, room.held, lambda: None)
        self.owner = Owner(room.world, room.links, room.held.own, lambda: None, lambda: None)
        self.recovery = SnapshotRecovery(
            *(room.world, room.links, room.job_dir, JOB_HASH),
            *(server, RepairSums(room.world, room.links, server), self.owner),
        )
        self.ended: list[str | None] = []

    def fetch(self, source: RestoreSource = FROM_TWO) -> None:
        self.recovery.fetch(source, STAMP, self.ended.append)

    def asked(self) -> list[int]:
        return [node for node, _ in self.room.sent(FetchRanges)]

    def restored(self) -> list[bytes]:
        """What lies among the rank's own slots now."""
        memory = self.room.memory
        return [payload_of(Slot(memory, path)) for path in slot_paths(memory, self.room.job_dir, 0)]


held = st.builds(HeldSnapshot, st.integers(0, NODES - 1), st.builds(Stamp, st.just(5), st.just(1)))
other = st.builds(HeldSnapshot, st.integers(0, NODES - 1), st.builds(Stamp, st.just(6), st.just(1)))
inventories = st.dictionaries(st.integers(0, NODES - 1), st.frozensets(held | other))
proven_by_ranks = st.dictionaries(
    st.integers(0, NODES - 1), st.frozensets(st.sampled_from([STAMP, Stamp(6, 1)]))
)


@given(inventories, proven_by_ranks)
def test_sources_are_nodes_that_have_told_and_have_that_very_stamp(
    told: dict[int, frozenset[HeldSnapshot]], proven: dict[int, frozenset[Stamp]]
) -> None:
    recovering = Recovering()
    recovery = recovering.recovery
    assert recovery.silent_nodes() == frozenset(range(NODES))
    for node, snapshots in told.items():
        recovery.receive_inventory(node, Inventory(snapshots))
    assert recovery.silent_nodes() == frozenset(range(NODES)) - told.keys()
    have = {
        rank: {
            node
            for node, snapshots in told.items()
            if (rank, STAMP) in snapshots or (rank == node and STAMP in proven.get(rank, ()))
        }
        for rank in range(NODES)
    }
    sources = recovery.sources(list(range(NODES)), STAMP, proven)
    assert {rank: set(source.copies) for rank, source in sources.items()} == {
        rank: nodes for rank, nodes in have.items() if nodes
    }
    restorable = recovery.restorable(proven)
    assert {rank for rank in range(NODES) if STAMP in restorable[rank]} == sources.keys()


@given(st.sets(st.integers(0, NODES - 1), min_size=1), st.integers(0, NODES - 1))
def test_only_who_fetches_and_who_gives_make_a_link(givers: set[int], here: int) -> None:
    recovering = Recovering(here)
    source = RestoreSource(1, copies=tuple(sorted(givers)))
    recovering.recovery.link_with_sources({1: source})
    expected = (givers if here == 1 else ({1} if here in givers else set())) - {here}
    assert {node for node, _, _ in recovering.room.net.connected} == expected


@pytest.mark.parametrize("are_open", [False, True])
@pytest.mark.parametrize("here", range(NODES))
def test_who_gives_pieces_of_codewords_is_linked_with_the_others_that_do(
    here: int, are_open: bool
) -> None:
    recovering = Recovering(here)
    if not are_open:
        recovering.room.net.away.update(range(NODES))
    givers = {0, 2, 3}
    members = tuple(GroupMember(rank, rank) for rank in sorted(givers))
    recovering.recovery.link_with_sources({1: RestoreSource(1, (), (0, 1, 2, 3), 1, members)})
    needed = givers if here == 1 else {1}
    made = needed | (set() if are_open or here == 1 else givers - {here})
    assert {node for node, _, _ in recovering.room.net.connected} == made
    assert {node for node in range(NODES) if recovering.room.links.needs(node)} >= needed
    others = set(range(NODES)) - needed
    assert not any(map(recovering.room.links.needs, others)), "their loss stops nobody"


@given(st.sets(st.integers(1, NODES - 1), min_size=1))
def test_what_is_fetched_is_what_lay_there(givers: set[int]) -> None:
    recovering = Recovering()
    recovering.fetch(RestoreSource(0, copies=tuple(givers)))
    asked = recovering.room.answer_fetches(recovering.source)
    assert recovering.ended == [None]
    assert set(asked) == givers
    assert recovering.restored() == [PAYLOAD]
    assert recovering.room.journal.kinds == ["fetched"]


def test_a_source_that_is_gone_is_not_asked_again_and_the_other_gives_all() -> None:
    for early in (True, False):
        recovering = Recovering()
        recovering.fetch()
        if not early:
            recovering.room.answer_fetches(recovering.source, silent={2})
            # so far the header came, and one half of the rest
            assert recovering.ended == []
        lost = 1 if early else 2
        before = recovering.asked().count(lost)
        recovering.recovery.link_is_dead(lost, "it is gone")
        recovering.room.answer_fetches(recovering.source, silent={lost})
        assert recovering.asked().count(lost) == before
        assert recovering.ended == [None]
        assert recovering.restored() == [PAYLOAD]


def test_who_says_that_it_has_not_got_it_is_not_asked_again() -> None:
    recovering = Recovering()
    recovering.fetch()
    assert not recovering.recovery.unavailable(1, 0, Stamp(6, 1), "of another stamp")
    assert not recovering.recovery.unavailable(1, 3, STAMP, "of another rank")
    assert recovering.asked() == [1]
    assert recovering.recovery.unavailable(1, 0, STAMP, "it is damaged")
    recovering.room.settle()
    assert recovering.asked() == [1, 2]
    recovering.recovery.unavailable(2, 0, STAMP, "it is damaged")
    assert len(recovering.ended) == 1 and recovering.ended[0] is not None
    assert recovering.restored() == []
    assert not recovering.recovery.unavailable(2, 0, STAMP, "it is damaged")


def test_that_nobody_is_reached_is_no_answer_and_it_is_fetched_when_somebody_is() -> None:
    recovering = Recovering()
    recovering.room.net.away = {1, 2}
    recovering.fetch()
    assert recovering.ended == []
    recovering.room.net.away = set()
    recovering.recovery.link_is_open(3)
    assert recovering.asked() == []
    recovering.recovery.link_is_open(2)
    recovering.room.answer_fetches(recovering.source)
    assert recovering.ended == [None]
    assert recovering.restored() == [PAYLOAD]
    asked = recovering.asked()
    recovering.recovery.link_is_open(1)
    assert recovering.asked() == asked


def test_what_waited_for_sources_is_wanted_no_more_once_others_are_named() -> None:
    recovering = Recovering()
    recovering.room.net.away = {1, 2}
    recovering.fetch()
    recovering.recovery.link_with_sources({})
    recovering.room.net.away = set()
    recovering.recovery.link_is_open(1)
    assert recovering.asked() == []


def test_a_snapshot_of_another_stamp_is_not_taken() -> None:
    recovering = Recovering()
    recovering.fetch(RestoreSource(0, copies=(1,)))
    (asked,) = recovering.room.said(FetchRanges)
    assert not recovering.room.give(1, recovering.other, asked.ranges[0])
    assert recovering.ended == []


def test_a_mesh_that_ends_leaves_no_half_of_a_snapshot() -> None:
    recovering = Recovering()
    recovering.fetch()
    recovering.room.answer_fetches(recovering.source, silent={2})
    recovering.recovery.end()
    recovering.room.answer_fetches(recovering.source)
    assert recovering.ended == []
    assert recovering.restored() == []
    directory = recovering.room.job_dir / "rank-00000"
    assert recovering.room.memory.names(directory) == []


class Mending(Recovering):
    """The rank's own snapshot lies here, and nodes hold copies of it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = self.room.seal(0, STAMP, PAYLOAD)
        self.assignments = assignments(parse_policy("copies:2"), self.room.mesh)
        self.owner.follow(self.assignments)

    def protect(self) -> None:
        self.owner.protect(STAMP, None)
        for node in self.assignments[0].holders:
            self.owner.acked(node, 0, STAMP)
        self.room.net.sent.clear()

    def mend(self) -> None:
        self.recovery.mend(0, 0, STAMP, self.ended.append)


@given(st.integers(0, len(PAYLOAD) - 1), st.integers(0, 7))
def test_a_flipped_bit_is_mended_in_place_and_the_slot_stands_still_for_it(
    at: int, bit: int
) -> None:
    mending = Mending()
    mending.protect()
    mending.own.payload[at] ^= 1 << bit
    mending.mend()
    assert not mending.own.lock(exclusive=True)
    mending.room.answer_fetches(mending.source)
    assert mending.ended == [None]
    assert payload_of(mending.own) == PAYLOAD
    assert mending.own.lock(exclusive=True)
    assert mending.room.memory.names(mending.own.path.parent) == ["slot-0"]


def test_what_no_other_node_has_proven_is_not_asked_for() -> None:
    mending = Mending()
    mending.mend()
    assert len(mending.ended) == 1 and mending.ended[0] is not None
    assert mending.room.net.sent == []


def test_what_is_being_overwritten_is_not_mended() -> None:
    mending = Mending()
    mending.protect()
    rank_map = Slot(mending.room.memory, mending.own.path)
    assert rank_map.lock(exclusive=True)
    mending.mend()
    assert len(mending.ended) == 1 and mending.ended[0] is not None
    assert mending.room.net.sent == []


def test_what_is_not_there_is_not_mended() -> None:
    mending = Mending()
    mending.protect()
    mending.room.memory.remove(mending.own.path)
    mending.mend()
    assert len(mending.ended) == 1 and "cannot be opened" in (mending.ended[0] or "")
    assert mending.room.net.sent == []
    mending.room.seal(0, STAMP, PAYLOAD)
    mending.mend()
    mending.room.answer_fetches(mending.source)
    assert mending.ended[1:] == [None]
