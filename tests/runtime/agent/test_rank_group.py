"""RankGroup: when an attempt begins every rank of the node is one process, started for it or
staying, and nothing is started before what is to be killed is gone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.model.events import WARNING
from keepstep.model.launch import REJOIN, RankAssignment
from keepstep.model.messages.agent_rank import (
    BecomeRank,
    CannotStay,
    CanStay,
    PeerLostNotice,
    RankHere,
    RegroupAt,
    Regrouped,
    StandbyReady,
)
from keepstep.model.restarts import RegroupLate, RestartAll
from keepstep.model.units import S_NS
from keepstep.runtime.agent.enforcer import Enforcer
from keepstep.runtime.agent.rank_group import REGROUP_STARTS, STANDBY_AFTER_NS, RankGroup
from keepstep.runtime.agent.rank_server import RankServer
from tests.runtime.fakes import AgentRoom, FakeBox

ANEW = RestartAll("rank 1 was killed", "rank 1 was killed", refused="rank 0 cannot")
KEEP = replace(ANEW, keep=True, refused="")


class Node:
    """Two ranks, whose agent knows how to kill and to start them."""

    def __init__(self, home: Path, standby: int = 0, ranks: int = 2) -> None:
        self.room = AgentRoom(home, ranks)
        self.room.launch = replace(self.room.launch, standby=standby)
        self.late: list[RegroupLate] = []
        world, options = self.room.world, self.room.options
        self.server = RankServer(options.job_dir / "agent.sock", world.serve_boxes, self)
        self.server.open()
        enforcer = Enforcer(world, options, self.server)
        self.group = RankGroup(
            world, options, self.room.launch, self.server, enforcer, self.late.append
        )
        self.processes = self.room.processes
        self.processes.listen(lambda ends: self.group.ended([end.rank for end in ends]))
        self.boxes: dict[int, FakeBox] = {}  # by rank on the node

    # -- what the server tells the agent

    def rank_has_state(self) -> None:
        self.group.rank_has_state()

    def rank_regrouped(self) -> None:
        self.group.rank_regrouped()

    def rank_cannot_stay(self, rank: int) -> None:
        self.group.rank_cannot_stay(rank)

    def rank_suspects(self, rank: int, why: str) -> None: ...

    def standby_ready(self, pid: int, unbuilt: str) -> bool:
        return True

    # -- attempts

    def enter(self, attempt: int, keep: bool = False, first_rank: int = 0) -> None:
        ranks = self.room.launch.ranks
        place = RankAssignment(attempt, 0, 1, first_rank, first_rank + ranks, "h", 7000 + attempt)
        undead: list[list[int]] = []
        self.group.enter(place, keep, undead.append)
        self.room.time.pass_ns(10)
        assert undead == [[]]
        self.group.fill(None, self.room.time.now_ns)

    def connect(self, rank: int, can_stay: bool = True) -> None:
        pid = self.processes.living[rank]
        box = self.boxes[rank] = FakeBox(pid, self.server)
        box.says(RankHere(rank, pid))
        box.says(CanStay(rank) if can_stay else CannotStay(rank))

    def restart(self, action: RestartAll) -> None:
        if action.keep:
            self.group.notify(action)
        else:
            self.group.end(action, lambda undead: None)
            self.room.time.pass_ns(10)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    found = Node(tmp_path)
    found.enter(0)
    return found


LIVES = st.lists(
    st.tuples(st.booleans(), st.sets(st.integers(0, 2)), st.sets(st.integers(0, 2))), max_size=4
)


@settings(deadline=None, max_examples=40)
@given(LIVES)
def test_every_rank_is_one_process_that_was_started_or_stayed(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[bool, set[int], set[int]]]
) -> None:
    """Of each attempt: whether ranks may stay, which can, which die before the next one."""
    node = Node(tmp_path_factory.mktemp("g"), ranks=3)
    node.enter(0)
    for attempt, (keep, can_stay, dying) in enumerate(lives, 1):
        for rank in sorted(node.processes.living):
            node.connect(rank, rank in can_stay)
        before = dict(node.processes.living)
        node.processes.end(*((rank, -9) for rank in dying))
        node.restart(KEEP if keep else ANEW)
        node.enter(attempt, keep)
        now = node.processes.living
        assert set(now) == {0, 1, 2} and len(set(now.values())) == 3
        stayed = {rank for rank in now if now[rank] == before[rank]}
        assert stayed == ((can_stay - dying) if keep else set())
        place, started, environ = node.processes.started[-1]
        assert place.attempt == attempt and started == {0, 1, 2} - stayed
        assert (environ == {REJOIN: "1"}) == keep
        assert node.room.told.attempts[-1] == attempt


def test_nothing_begins_before_what_is_to_be_killed_is_gone(node: Node) -> None:
    node.processes.undead = {1}
    ended: list[list[int]] = []
    node.group.end(ANEW, ended.append)
    node.room.time.pass_ns(10)
    assert ended == [] and set(node.processes.living) == {1}
    node.room.time.pass_ns(node.room.options.deadlines.kill_ns)
    assert ended == [[1]], "it does not die, and that is told"


def test_ends_that_were_asked_for_here_are_nobodys_failure(node: Node) -> None:
    told: list[int] = []
    node.processes.listen(lambda ends: told.extend(e.rank for e in node.group.by_themselves(ends)))
    node.processes.end((1, -9))
    node.group.kill({0}, lambda undead: None)
    node.room.time.pass_ns(10)
    assert told == [1]


def test_who_was_to_stay_and_dies_before_the_attempt_begins_is_started_anew(node: Node) -> None:
    node.connect(0)
    node.connect(1, can_stay=False)
    place = RankAssignment(1, 0, 1, 0, 2, "h", 7001)
    node.group.enter(place, True, lambda undead: None)
    node.processes.end((0, -9))
    node.room.time.pass_ns(10)
    node.group.fill(None, node.room.time.now_ns)
    assert node.processes.started[-1][1] == {0, 1}


def test_those_that_stay_are_told_what_is_lost_and_where_to_meet_once(node: Node) -> None:
    node.connect(0)
    node.processes.end((1, -9))
    node.restart(KEEP)
    assert node.boxes[0].poked == [PeerLostNotice("rank 1 was killed")]
    node.enter(1, keep=True)
    node.group.order_regroup()
    node.group.order_regroup()
    assert node.boxes[0].sent == [RegroupAt(1, "h", 7001)]
    assert node.room.journal.kinds[-2:] == ["plan", "ranks-restarted"]


def test_who_is_new_is_not_told_where_to_meet(node: Node) -> None:
    """It knows; to who has not lost a peer this is the notice of it."""
    node.connect(0)
    node.processes.end((1, -9))
    node.restart(KEEP)
    node.enter(1, keep=True)
    node.connect(1)
    node.group.order_regroup()
    assert [len(node.boxes[rank].sent) for rank in (0, 1)] == [1, 0]


def regrouping(node: Node) -> None:
    node.connect(0)
    node.processes.end((1, -9))
    node.restart(KEEP)
    node.enter(1, keep=True)
    node.connect(1)


def warnings(node: Node) -> list[str]:
    journal = node.room.journal
    told = zip(journal.events, journal.levels, strict=True)
    return [event.kind for event, level in told if level >= WARNING]


@pytest.mark.parametrize(("action", "kind"), [(KEEP, "plan"), (ANEW, "anew")])
def test_what_has_happened_is_told_at_once_and_not_again(
    node: Node, action: RestartAll, kind: str
) -> None:
    """A program may load for minutes before it protects anything."""
    node.connect(0)
    node.processes.end((1, -9))
    node.restart(action)
    [told] = node.room.journal.of(kind)
    assert told.why == action.why and warnings(node) == [kind]
    node.enter(1, keep=action.keep)
    assert warnings(node) == [kind]


def test_who_waits_for_nodes_is_not_told_why_twice(node: Node) -> None:
    node.restart(replace(ANEW, least=2))
    assert node.room.journal.of("anew") and warnings(node) == []


def test_when_all_are_together_again_that_is_told_once(node: Node) -> None:
    regrouping(node)
    for rank in (0, 1):
        assert node.room.journal.of("recovered") == []
        node.boxes[rank].says(Regrouped(rank))
    [told] = node.room.journal.of("recovered")
    assert told.data["attempt"] == 1
    assert told.why.startswith("all ranks of this node train on after ")
    assert warnings(node) == ["plan", "recovered"]
    node.room.time.pass_ns(2 * node.room.options.deadlines.regroup_ns)
    assert node.late == []


def test_who_does_not_find_its_peers_in_time_is_named(node: Node) -> None:
    regrouping(node)
    node.boxes[0].says(Regrouped(0))
    within_ns = node.room.options.deadlines.regroup_ns
    node.room.time.pass_ns(within_ns)
    assert [(late.ranks, late.within_ns) for late in node.late] == [((1,), within_ns)]


def test_a_program_that_takes_long_to_begin_has_longer_to_regroup(node: Node) -> None:
    starting_ns = node.room.options.deadlines.regroup_ns
    node.room.time.pass_ns(starting_ns)
    regrouping(node)
    node.room.time.pass_ns(REGROUP_STARTS * starting_ns - 1)
    assert node.late == []
    node.room.time.pass_ns(100)
    assert len(node.late) == 1


def test_when_all_have_died_nobody_is_waited_for(node: Node) -> None:
    """The second one dies while the first one's successor is started, so nobody stays."""
    regrouping(node)
    node.processes.end((0, -9), (1, -9))
    node.restart(KEEP)
    node.enter(2, keep=False)
    assert node.processes.started[-1][1:] == ({0, 1}, {})
    told = node.room.journal.of("ranks-restarted")[-1]
    assert (told.data["attempt"], told.data["kept"]) == (2, 0)
    node.room.time.pass_ns(2 * node.room.options.deadlines.regroup_ns)
    assert node.late == [] and list(node.group.ended_well([0])) == []
    node.restart(replace(KEEP, why="rank 1 was killed again"))
    assert node.group._restart is not None and "; then " not in node.group._restart.why


def test_who_had_done_its_last_step_is_not_waited_for(node: Node) -> None:
    regrouping(node)
    [late] = node.group.ended_well([0])
    assert (late.ranks, late.within_ns) == ((0,), 0)
    assert list(node.group.ended_well([0])) == []


def test_why_nobody_stays_is_told(node: Node) -> None:
    node.restart(ANEW)
    assert [e.data["rung"] for e in node.room.journal.of("refused")] == ["regroup"]


def test_ranks_of_another_number_do_not_stay(node: Node) -> None:
    node.connect(0)
    before = node.processes.living[0]
    node.restart(KEEP)
    node.enter(1, keep=True, first_rank=2)
    assert node.processes.living[0] != before


# -- the process that stands by


def test_it_is_started_once_the_ranks_train_and_becomes_the_first_that_is_missing(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, standby=1)
    node.enter(0)
    assert node.processes.standby_pid is None
    node.room.time.pass_ns(STANDBY_AFTER_NS)
    pid = node.processes.standby_pid
    assert pid is not None
    box = FakeBox(pid, node.server)
    box.says(StandbyReady(pid))
    node.restart(ANEW)
    node.enter(1)
    assert node.processes.living[0] == pid
    assert box.of(BecomeRank) == [BecomeRank(node.room.launch.command, {"RANK": "0"})]
    assert node.processes.started[-1][1] == {1}
    assert [e.data["rank"] for e in node.room.journal.of("rank-respawned")] == [0]


def test_none_stands_by_for_a_program_that_it_cannot_become(tmp_path: Path) -> None:
    node = Node(tmp_path, standby=1)
    node.room.launch = replace(node.room.launch, command=("bash", "train.sh"))
    world, options = node.room.world, node.room.options
    node.group = RankGroup(
        world,
        options,
        node.room.launch,
        node.server,
        Enforcer(world, options, node.server),
        node.late.append,
    )
    node.enter(0)
    node.room.time.pass_ns(2 * STANDBY_AFTER_NS)
    assert node.processes.standby_pid is None


def test_after_the_end_nothing_comes(tmp_path: Path) -> None:
    node = Node(tmp_path, standby=1)
    node.enter(0)
    node.group.close()
    node.room.time.pass_ns(2 * STANDBY_AFTER_NS)
    assert node.processes.standby_pid is None


def test_a_rank_that_cannot_stay_after_all_is_not_waited_for(node: Node) -> None:
    node.connect(0)
    node.connect(1)
    node.processes.end((1, -9))
    node.restart(KEEP)
    node.enter(1, keep=True)
    node.boxes[0].says(CannotStay(0))
    assert [late.ranks for late in node.late] == [(0,)]


def test_what_a_swap_costs_is_learnt_from_starts_and_then_from_restarts(node: Node) -> None:
    group, time = node.group, node.room.time
    assert "assumed" in group.swap_price.source
    time.pass_ns(18 * S_NS)
    node.connect(0)
    node.connect(1)
    assert (group.swap_price.ns, group.swap_price.source[:8]) == (18 * S_NS, "measured")
    node.restart(ANEW)
    time.pass_ns(3600 * S_NS)  # another node is waited for
    node.enter(1)
    time.pass_ns(15 * S_NS)
    node.connect(0)
    assert group.swap_price.ns == 18 * S_NS, "not all have their state"
    time.pass_ns(S_NS)
    node.connect(1)
    kill_ns = 1
    assert group.swap_price.ns == 16 * S_NS + kill_ns, "nobody counts how long nodes are waited for"
    assert group.swap_price.source == "measured: 1 restart of this run"


def test_a_restart_upon_which_another_came_is_no_measure(node: Node) -> None:
    group, time = node.group, node.room.time
    node.restart(ANEW)
    node.enter(1)
    time.pass_ns(4 * S_NS)
    node.connect(0)
    node.restart(KEEP)
    node.enter(2, keep=True)
    time.pass_ns(50 * S_NS)
    node.connect(1)
    assert "no restart of all was seen" in group.swap_price.source
