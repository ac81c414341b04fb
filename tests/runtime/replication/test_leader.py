"""Leader: what is announced, when, to whom, and that it never goes back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import ConfigError
from keepstep.model.messages.peers import AllEnded, HorizonWord, NodeReport, RanksReport
from keepstep.model.snapshot import Stamp
from keepstep.model.topology import Auto, Policy, parse_policy
from keepstep.model.units import GIB, MIB, S_NS
from keepstep.runtime.replication.leader import TRY_AGAIN_FIRST_NS, Leader
from tests.runtime.replication.room import VERSION, ReplicationRoom

NODES = 3
EPOCH = 1002  # of a job that has run for long
INHERITED = Stamp(1, 1)
stamps = st.builds(Stamp, st.integers(2, 6), st.just(EPOCH))
rows = st.tuples(st.frozensets(stamps), st.frozensets(stamps), st.none() | stamps)


class Leading:
    """A leader of three nodes with a rank each."""

    def __init__(
        self, policy: str = "copies:2", nodes: int = NODES, has_one_slot: bool = False
    ) -> None:
        self.room = ReplicationRoom(nodes=nodes)
        self.room.join()
        asked: Policy = Auto() if policy == "auto" else parse_policy(policy)
        self.asked = policy
        self.followed: list[HorizonWord] = []  # by this node
        self.said_before: list[int] = []  # to node 1, when each of those was followed
        room = self.room
        self.leader = Leader(room.links, asked, room.time, room.journal, self.follow, has_one_slot)

    def follow(self, word: HorizonWord) -> None:
        self.said_before.append(len(self.room.said(HorizonWord, 1)))
        self.followed.append(word)

    def report(
        self,
        node: int,
        sealed: frozenset[Stamp] = frozenset(),
        protected: frozenset[Stamp] = frozenset(),
        pending: Stamp | None = None,
        **about: Any,
    ) -> None:
        row = RanksReport(
            (node,), tuple(sorted(sealed | protected)), pending, 6, tuple(sorted(protected))
        )
        known: dict[str, Any] = {
            "mesh_version": VERSION,
            "epoch": int(str(EPOCH)),  # equal, as what comes from elsewhere is
            "committed": None,
            "target": None,
            "inherited": None,
            "snapshot_bytes": MIB,
            "free_bytes": GIB,
            "hindered": "",
            "ranks": (row,),
            "policy": self.followed[-1].policy if self.followed else self.asked,
        }
        self.leader.receive_report(node, NodeReport(**{**known, **about}))
        self.leader.decide()

    def words(self, node: int) -> list[HorizonWord]:
        """All that this node was told."""
        self.room.settle()
        if node == 0:
            return self.followed
        return self.room.said(HorizonWord, node)


def floor_of(word: HorizonWord) -> Stamp:
    return word.committed or word.inherited or Stamp(-1, 0)


def test_the_slowest_node_sets_the_period_of_captures_for_all() -> None:
    scene = Leading()
    for node in range(NODES):
        scene.report(node, span_steps=1 + node)
    assert {scene.words(node)[-1].period_steps for node in range(NODES)} == {NODES}
    before = len(scene.words(0))
    scene.report(0, span_steps=1)
    assert len(scene.words(0)) == before, "nothing is new"
    scene.report(NODES - 1, span_steps=1)
    assert {scene.words(node)[-1].period_steps for node in range(NODES)} == {NODES - 1}


@given(
    st.lists(st.tuples(st.integers(0, NODES - 1), rows), max_size=12),
    st.sampled_from([None, INHERITED]),
)
def test_nothing_is_announced_before_all_have_reported_and_nothing_goes_back(
    reports: list[tuple[int, tuple[frozenset[Stamp], frozenset[Stamp], Stamp | None]]],
    inherited: Stamp | None,
) -> None:
    leading = Leading()
    seen: set[int] = set()
    for node, (sealed, protected, pending) in reports:
        leading.report(node, sealed, protected, pending, inherited=inherited)
        seen.add(node)
        assert len(seen) == NODES or leading.words(1) == []
    words = leading.words(1)
    floors = [floor_of(word) for word in words]
    assert floors == sorted(floors)
    assert bool(words) == (len(seen) == NODES)
    for node in (0, 2):
        assert leading.words(node) == words


@given(st.lists(st.tuples(st.integers(0, NODES - 1), st.frozensets(stamps)), max_size=12))
def test_committed_is_what_all_have_proven_at_one_moment(
    reports: list[tuple[int, frozenset[Stamp]]],
) -> None:
    leading = Leading()
    last: dict[int, frozenset[Stamp]] = {}
    proven: set[Stamp] = set()
    for node, protected in reports:
        leading.report(node, protected=protected)
        last[node] = protected
        if len(last) == NODES:
            proven |= frozenset.intersection(*last.values())
    words = leading.words(1)
    assert {w.committed for w in words} - {None} <= proven
    if words:
        assert words[-1].committed == max(proven, default=None)


@given(st.lists(st.tuples(st.integers(0, NODES - 1), st.frozensets(stamps)), max_size=12))
def test_this_node_follows_every_word_before_another_one_is_told(
    reports: list[tuple[int, frozenset[Stamp]]],
) -> None:
    leading = Leading()
    leading.leader.resumed(EPOCH)
    for node, protected in reports:
        leading.report(node, protected=protected)
    assert leading.followed == leading.words(1)
    assert leading.said_before == list(range(len(leading.followed)))


def test_what_a_leader_before_has_announced_is_taken_up() -> None:
    leading = Leading()
    both = frozenset({Stamp(3, EPOCH), Stamp(4, EPOCH)})
    leading.report(0, both, target=Stamp(3, EPOCH))
    leading.report(1, both)
    leading.report(2, both, committed=Stamp(2, EPOCH))
    (word,) = leading.words(1)
    assert (word.committed, word.target) == (Stamp(2, EPOCH), Stamp(3, EPOCH))


def test_reports_of_another_epoch_count_for_nothing() -> None:
    leading = Leading()
    leading.leader.resumed(EPOCH)
    sealed = frozenset({Stamp(3, EPOCH)})
    before = leading.words(1)
    for node in range(NODES):
        leading.report(node, sealed, sealed, epoch=EPOCH - 1)
    assert leading.words(1) == before
    assert leading.leader.holdings() == []
    for node in range(NODES):
        leading.report(node, sealed, sealed)
    assert leading.words(1)[-1].committed == Stamp(3, EPOCH)
    assert len(leading.leader.holdings()) == NODES


def test_who_comes_back_is_told_the_last_horizon_and_nobody_else_is() -> None:
    leading = Leading()
    leading.leader.link_is_open(2)
    assert leading.words(2) == []
    leading.leader.resumed(EPOCH)
    before = {node: leading.words(node) for node in range(NODES)}
    leading.leader.link_is_open(2)
    assert leading.words(1) == before[1]
    assert leading.words(2) == [*before[2], before[2][-1]]


@given(st.lists(st.integers(0, NODES - 1), max_size=8))
def test_the_job_is_over_when_every_node_has_ended(ended: list[int]) -> None:
    leading = Leading()
    for count, node in enumerate(ended, 1):
        leading.leader.ended(node)
        is_over = len(set(ended[:count])) == NODES
        assert bool(leading.room.said(AllEnded, 1)) == is_over


def test_a_policy_that_cannot_be_followed_is_given_up() -> None:
    leading = Leading()
    sealed = frozenset({Stamp(3, EPOCH)})
    for node in range(NODES):
        leading.report(node, sealed)
    assert {word.policy for word in leading.words(1)} == {"copies:2"}
    leading.report(1, sealed, hindered="no memory")
    leading.report(1, sealed, sealed)
    assert leading.words(1)[-1].policy == "none"
    assert [event.data["policy"] for event in leading.room.journal.of("policy")] == [
        "copies:2",
        "none",
    ]


def test_what_was_given_up_is_tried_again_after_longer_and_longer() -> None:
    leading = Leading()
    sealed = frozenset({Stamp(3, EPOCH)})
    for node in range(NODES):
        leading.report(node, sealed)
    waits = []
    for _ in range(6):
        leading.report(1, sealed, hindered="no memory")
        assert leading.words(1)[-1].policy == "none"
        assert "no memory" in leading.words(1)[-1].why
        began_ns = leading.room.time.monotonic_ns()
        while leading.words(1)[-1].policy == "none":
            leading.room.time.pass_ns(S_NS)
            leading.leader.tick()
        waits.append((leading.room.time.monotonic_ns() - began_ns) // S_NS)
        assert leading.words(1)[-1].policy == "copies:2"
    assert waits == [60, 120, 240, 480, 960, 960]
    leading.room.time.pass_ns(3600 * S_NS)
    leading.leader.tick()
    assert leading.words(1)[-1].policy == "copies:2", "there is room again: it stays"


def test_what_lies_on_its_own_node_alone_is_not_committed_when_copies_are_tried_again() -> None:
    """A report that was made under `none` calls protected what is sealed; one that comes late says
    that there is no room for what is not wanted any more."""
    leading = Leading()
    three, four = frozenset({Stamp(3, EPOCH)}), frozenset({Stamp(4, EPOCH)})
    for node in range(NODES):
        leading.report(node, three)
    leading.report(1, three, hindered="no memory")
    for node in range(NODES):
        leading.report(node, three, three)
    assert leading.words(1)[-1].committed == Stamp(3, EPOCH)
    leading.report(0, four, four)
    leading.room.time.pass_ns(TRY_AGAIN_FIRST_NS)
    leading.leader.tick()
    for node in range(NODES):
        leading.report(node, four, four, policy="none", hindered="no memory")
    assert leading.words(1)[-1].policy == "copies:2"
    assert leading.words(1)[-1].committed == Stamp(3, EPOCH)
    leading.report(0, four, four)
    leading.report(1, four, four)
    assert leading.words(1)[-1].committed == Stamp(3, EPOCH), "node 2 has no copy that is proven"
    leading.report(2, four, four)
    assert leading.words(1)[-1].committed == Stamp(4, EPOCH)


def test_what_was_said_before_the_policy_was_chosen_anew_counts_where_it_is_the_same() -> None:
    """Another leader comes, while all follow what the one before had chosen; none says it twice."""
    before, leading = Leading("auto"), Leading("auto")
    stamp = frozenset({Stamp(3, EPOCH)})
    for node in range(NODES):
        before.report(node)
    chosen = before.words(1)[-1].policy
    for node in range(NODES):
        leading.report(node, stamp, stamp, policy=chosen)
    assert leading.words(1)[-1].committed == Stamp(3, EPOCH)


def test_without_a_wish_the_policy_is_chosen_once_all_nodes_sizes_are_known() -> None:
    leading = Leading("auto")
    for node in range(NODES):
        assert leading.room.journal.of("policy") == []
        leading.report(node, snapshot_bytes=MIB)
    assert len(leading.room.journal.of("policy")) == 1
    assert leading.words(2)[-1].policy != "auto"


def test_a_policy_that_these_nodes_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError):
        Leading("copies:4")


def test_safety_is_told_of_what_is_proven_once_all_is_known() -> None:
    leading = Leading()
    everybody = set(range(NODES))
    stamp = frozenset({Stamp(3, EPOCH)})
    leading.report(0, stamp, stamp)
    leading.report(1, stamp, stamp)
    assert leading.leader.safety(everybody) is None
    leading.report(2, stamp)
    unproven = leading.leader.safety(everybody)
    leading.report(2, stamp, stamp)
    proven = leading.leader.safety(everybody)
    assert unproven is not None and proven is not None
    assert (unproven.is_committed, unproven.any_nodes) == (False, 0)
    assert (proven.is_committed, proven.any_nodes) == (True, 1)
    assert [tuple(r) for r in unproven.alone] == [(2, 2)]
    assert proven.alone == ()


@pytest.mark.parametrize(("policy", "any_nodes"), [("copies:2", 0), ("copies:3", 1)])
def test_with_one_slot_a_ranks_own_snapshot_makes_no_node_expendable(
    policy: str, any_nodes: int
) -> None:
    """It may be overwritten the moment after."""
    leading = Leading(policy, has_one_slot=True)
    stamp = frozenset({Stamp(3, EPOCH)})
    for node in range(NODES):
        leading.report(node, stamp, stamp)
    told = leading.leader.safety(set(range(NODES)))
    assert told is not None and (told.is_committed, told.any_nodes) == (True, any_nodes)
    assert ("no node may be lost" if not any_nodes else "any 1 node may") in told.policy_why
    assert bool(told.critical or told.alone) == (any_nodes == 0)


def test_with_one_slot_copies_are_not_given_up_where_memory_is_short() -> None:
    """Without them what a rank overwrites would be nowhere."""
    leading = Leading(has_one_slot=True)
    sealed = frozenset({Stamp(3, EPOCH)})
    for node in range(NODES):
        leading.report(node, sealed)
    for _ in range(2):
        leading.report(1, sealed, hindered="no memory")
    assert {word.policy for word in leading.words(1)} == {"copies:2"}
    [event] = leading.room.journal.of("copies-needed")
    assert "no memory" in event.why
    for node in range(NODES):
        leading.report(node, sealed, sealed)
    assert leading.words(1)[-1].committed == Stamp(3, EPOCH)
