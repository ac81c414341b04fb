"""Agent: a job from its beginning to its end over ports alone: what fails is restarted,
every job ends with one exit code, and whoever follows a killed agent ends its ranks first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.recovery.restarts import CODE_REFUSED, STOP_WITHIN_NS
from keepstep.errors import KeeperError, KeepstepError
from keepstep.model.launch import Predecessor
from keepstep.model.messages.agent_rank import (
    CanStay,
    ConnectionSuspect,
    PeerLostNotice,
    RankHere,
    RegroupAt,
    Regrouped,
    TrainingEnded,
)
from keepstep.model.messages.keeper_agent import JobEnded, MeshKnown, PeerDead
from keepstep.model.messages.keeper_rank import BeginMesh, CannotListen, Listening, VoteRefused
from keepstep.model.signals import SIGTERM
from keepstep.model.units import S_NS
from keepstep.runtime.agent import meeting
from keepstep.runtime.agent.agent import Agent
from tests.runtime.fakes import AgentRoom, FakeBox, FakeTime, Table


class Node:
    """An agent in its room."""

    def __init__(self, room: AgentRoom) -> None:
        self.room = room
        self.outcome: list[int | KeepstepError] = []
        self.agent = Agent(room.world, room.options, room.launch, self.outcome.append)
        self.processes = room.processes

    def begin(self) -> Node:
        self.agent.begin()
        self.room.settle()
        return self

    def connect(self, rank: int, can_stay: bool = True) -> FakeBox:
        pid = self.processes.living[rank]
        box = FakeBox(pid, self.room.servers[0].hearer)
        box.says(RankHere(rank, pid))
        if can_stay:
            box.says(CanStay(rank))
        return box

    def end(self, rank: int, code: int, message: str = "") -> None:
        """Of its rank's process."""
        if code == 0:
            FakeBox(self.processes.living[rank], self.room.servers[0].hearer).says(
                TrainingEnded(rank)
            )
        self.room.probes.states[self.processes.living[rank]] = "gone"
        self.processes.end((rank, code), message=message)
        self.pass_ns(10)

    def pass_ns(self, duration_ns: int) -> None:
        self.room.time.pass_ns(duration_ns)
        self.room.settle()

    def clean_up(self) -> None:
        """The keeper removes the memory and goes."""
        box = self.room.keepers.box
        if box.of(JobEnded):
            for path in self.room.options.job_dir.iterdir():
                path.unlink()
            self.room.options.job_dir.rmdir()
            box.dies()
            self.room.settle()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(AgentRoom(tmp_path)).begin()


@settings(deadline=None, max_examples=40)
@given(
    budget=st.integers(0, 3),
    story=st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 1, -9])), max_size=12),
    has_store=st.booleans(),
)
def test_every_story_ends_with_one_code_and_within_its_budget(
    tmp_path_factory: pytest.TempPathFactory,
    budget: int,
    story: list[tuple[int, int]],
    has_store: bool,
) -> None:
    room = AgentRoom(tmp_path_factory.mktemp("a"))
    room.launch = replace(room.launch, max_restarts=budget)
    room.change(has_store=has_store)
    node = Node(room).begin()
    for rank, code in story:
        if rank in node.processes.living:
            node.pass_ns(60 * S_NS)
            node.end(rank, code)
    for rank in sorted(node.processes.living):
        node.end(rank, 0)
    node.clean_up()
    assert len(node.outcome) == 1 and node.processes.living == {}
    assert len(node.processes.started) <= budget + 1
    assert room.told.last_words == node.outcome
    [ended] = room.journal.of("job-ended")
    assert ended.data["exit_code"] == node.outcome[0]
    assert not room.servers[0].is_open and room.places.is_closed


def test_a_job_that_ends_well(node: Node) -> None:
    [started] = node.room.journal.of("job-started")
    assert started.data["pid"] == 500 and ": 2 ranks of `" in started.why
    assert set(node.processes.living) == {0, 1}
    for rank in (0, 1):
        assert node.outcome == []
        node.end(rank, 0)
    [said] = node.room.keepers.box.of(JobEnded)
    assert said.ok and node.outcome == [], "the keeper cleans up"
    node.clean_up()
    assert node.outcome == [0] and node.processes.closed == [False]


def test_without_a_keeper_the_job_does_not_begin(tmp_path: Path) -> None:
    room = AgentRoom(tmp_path)
    room.keepers.error = KeeperError("none")
    node = Node(room).begin()
    assert node.outcome == [room.keepers.error] and node.processes.started == []


def test_where_nobody_may_train_the_job_ends_at_once_and_the_memory_stays(node: Node) -> None:
    node.room.keepers.box.says(VoteRefused("memory is of 3 ranks", is_final=True))
    node.pass_ns(10)
    [said] = node.room.keepers.box.of(JobEnded)
    assert not said.ok and node.processes.living == {}
    node.clean_up()
    assert node.outcome == [CODE_REFUSED] and len(node.processes.started) == 1


def test_a_rank_that_is_killed_has_all_start_anew(node: Node) -> None:
    node.end(1, -9)
    assert [ranks for _, ranks, _ in node.processes.started] == [{0, 1}, {0, 1}]
    assert node.processes.killed == [{0}]
    assert [e.data["attempt"] for e in node.room.journal.of("ranks-restarted")] == [1]


def test_ranks_that_can_stay_do(node: Node) -> None:
    boxes = [node.connect(rank) for rank in (0, 1)]
    staying = node.processes.living[0]
    node.end(1, -9)
    assert isinstance(boxes[0].poked[0], PeerLostNotice)
    assert isinstance(boxes[0].sent[-1], RegroupAt)
    assert node.processes.living[0] == staying and node.processes.killed == []
    newcomer = node.connect(1)
    boxes[0].says(Regrouped(0))
    newcomer.says(Regrouped(1))
    assert len(node.room.journal.of("recovered")) == 1


def newcomer_is_killed(tmp_path: Path) -> Node:
    """Ranks 1 and 2 of three were lost one after the other; rank 0 is to stay, and the new process
    of rank 1, which has not said that it can, is being killed."""
    node = Node(AgentRoom(tmp_path, 3)).begin()
    for rank in (0, 1, 2):
        node.connect(rank)
    node.end(1, -9)
    node.processes.undead = {1}
    node.end(2, -9)
    assert node.processes.killed == [{1}] and set(node.processes.living) == {0, 1}
    return node


def test_one_that_was_to_stay_ends_together_with_the_one_that_was_killed(tmp_path: Path) -> None:
    """What ended by itself is told before the next attempt begins with the end of the other."""
    node = newcomer_is_killed(tmp_path)
    for rank in (0, 1):
        node.room.probes.states[node.processes.living[rank]] = "gone"
    node.processes.end((0, -9), (1, -9))
    node.pass_ns(10)
    assert node.processes.started[-1][1] == {0, 1, 2}
    assert [e.data["rank"] for e in node.room.journal.of("rank-exited")] == [1, 2, 0]


def test_nobody_takes_the_place_of_one_that_outlives_its_kill(tmp_path: Path) -> None:
    node = newcomer_is_killed(tmp_path)
    started = list(node.processes.started)
    node.pass_ns(node.room.options.deadlines.kill_ns)
    node.pass_ns(node.room.options.deadlines.kill_ns)
    node.clean_up()
    assert node.processes.started == started and node.outcome == [1]
    assert "hangs in the kernel" in node.room.journal.of("job-ended")[0].why


def test_a_signal_stops_the_ranks_and_then_the_job(node: Node) -> None:
    node.agent.signalled(SIGTERM)
    assert node.processes.signals == [SIGTERM] and node.outcome == []
    for rank in (0, 1):
        node.end(rank, -SIGTERM)
    node.clean_up()
    assert node.outcome == [128 + SIGTERM]


def test_ranks_that_do_not_stop_are_killed(node: Node) -> None:
    node.agent.signalled(SIGTERM)
    node.pass_ns(STOP_WITHIN_NS)
    node.pass_ns(10)
    assert node.processes.killed[-1] == {0, 1}
    node.clean_up()
    assert node.outcome == [128 + SIGTERM]


def test_what_was_too_much_is_shown(tmp_path: Path) -> None:
    room = AgentRoom(tmp_path)
    room.launch = replace(room.launch, max_restarts=0)
    node = Node(room).begin()
    node.end(1, 3, "ValueError: no")
    node.clean_up()
    assert node.outcome == [1] and room.told.shown == ["failed: [(1, 3)]"]
    assert node.processes.closed == [True], "what ranks left about their errors stays"


def test_whoever_follows_a_killed_agent_ends_its_ranks_and_goes_on_from_memory(
    tmp_path: Path,
) -> None:
    room = AgentRoom(tmp_path)
    room.change(predecessor=Predecessor((499,), 3))
    node = Node(room)
    node.agent.begin()
    assert node.processes.started == [] and node.processes.orphans == [499]
    node.pass_ns(10)
    assert node.processes.started[0][0].attempt == 4
    [told] = room.journal.of("agent-restarted")
    assert told.data == {"pid": 500, "ended": [11, 12]}


def test_whoever_follows_one_that_a_signal_was_to_end_ends_the_job_in_its_place(
    tmp_path: Path,
) -> None:
    room = AgentRoom(tmp_path)
    room.change(predecessor=Predecessor((499,), 3, SIGTERM))
    node = Node(room).begin()
    node.pass_ns(10)
    assert node.processes.orphans == [499] and node.processes.started == []
    node.clean_up()
    assert node.outcome == [128 + SIGTERM] == room.told.last_words
    [told] = room.journal.of("agent-restarted")
    assert "ends the job, as a signal was to" in told.why
    [said] = room.keepers.box.of(JobEnded)
    assert not said.ok, "the memory stays"


def test_restarts_in_vain_wait_longer_each_time(node: Node) -> None:
    for wait_ns in (0, 0, 0, S_NS, 2 * S_NS):
        begun = len(node.processes.started)
        node.end(1, -9)
        if wait_ns:
            node.pass_ns(wait_ns - 100)
            assert len(node.processes.started) == begun
            node.pass_ns(100)
        assert len(node.processes.started) == begun + 1


def test_what_ranks_suspect_is_told_and_nothing_follows(node: Node) -> None:
    node.connect(0).says(ConnectionSuspect(0, "closed"))
    assert [e.data["rank"] for e in node.room.journal.of("suspicion")] == [0]
    assert node.processes.killed == []


def test_a_rank_that_loses_all_its_connections_says_so_once(node: Node) -> None:
    box = node.connect(0)
    box.says(ConnectionSuspect(0, "to rank 1 closed"))
    box.says(ConnectionSuspect(0, "to rank 1 closed, too"))
    node.connect(1).says(ConnectionSuspect(1, "closed"))
    assert [e.data["rank"] for e in node.room.journal.of("suspicion")] == [0, 1]


@pytest.mark.parametrize("is_suspected_first", [False, True])
def test_a_rank_that_left_early_is_to_blame_and_not_the_one_that_waits_for_it(
    node: Node, is_suspected_first: bool
) -> None:
    """It said that its training had ended well: nothing but the other's collective tells."""
    waiting = node.connect(0)
    begun = len(node.processes.started)
    if is_suspected_first:
        waiting.says(ConnectionSuspect(0, "rank 1 closed"))
    node.end(1, 0)
    if not is_suspected_first:
        assert node.processes.killed == [] and len(node.processes.started) == begun
        waiting.says(ConnectionSuspect(0, "rank 1 closed"))
    node.pass_ns(10)
    [anew] = node.room.journal.of("anew")
    assert anew.why.startswith(
        "rank 1 ended with code 0, and rank 0 still waits for it in a collective"
    )
    [told] = node.room.journal.of("diagnosis")
    assert (told.data["kind"], told.data["culprit"]) == ("premature-exit", 1)
    assert len(node.processes.started) == begun + 1


def test_a_rank_that_leaves_early_each_time_ends_the_job(node: Node) -> None:
    for _ in range(2):  # before any step, which is enough
        waiting = node.connect(0)
        node.end(1, 0)
        waiting.says(ConnectionSuspect(0, "rank 1 closed"))
        node.pass_ns(S_NS)
    node.clean_up()
    assert node.outcome == [70]
    ended = node.room.journal.of("job-ended")[0].why
    assert "rank 1 ended with code 0, and rank 0 still waits" in ended


def test_who_suspected_something_and_is_gone_waits_for_nobody(node: Node) -> None:
    waiting = node.connect(0)
    waiting.says(ConnectionSuspect(0, "closed"))
    node.end(0, 0)
    node.end(1, 0)
    node.clean_up()
    assert node.outcome == [0]


def test_what_a_standby_cannot_build_is_told_once(node: Node) -> None:
    node.processes.standby_pid = 77
    for _ in range(2):
        assert node.agent.standby_ready(77, "models:make (ImportError: no models)")
    [told] = node.room.journal.of("caveat")
    assert "cannot build models:make (ImportError: no models)" in told.why


def test_a_standby_of_another_agent_is_not_taken(node: Node) -> None:
    assert not node.agent.standby_ready(99, "")


# -- several nodes


class Town:
    def __init__(self, home: Path, nodes: int, min_nodes: int | None = None) -> None:
        self.home, self.count = home, nodes
        self.min_nodes = nodes if min_nodes is None else min_nodes
        self.time, self.table = FakeTime(), Table()
        self.nodes: list[Node] = []

    def come(self, number: int) -> None:
        """Another node."""
        room = AgentRoom(self.home / str(number), 1, self.count, self.time, self.table, number)
        room.launch = replace(room.launch, min_nodes=self.min_nodes)
        room.change(shrink_after_s=1.0)
        node = Node(room).begin()
        self.nodes.append(node)
        node.room.keepers.box.says(Listening(f"host{number}", 7, 100 + number, -1))
        node.room.settle()

    def begin(self, missing: int = 0) -> Town:
        for number in range(self.count - missing):
            self.come(number)
        self.pass_s(3)
        return self

    def pass_s(self, seconds: float) -> None:
        for node in self.nodes:
            node.pass_ns(int(seconds * S_NS))


@pytest.fixture
def town(tmp_path: Path) -> Town:
    return Town(tmp_path, 2).begin()


def test_nodes_meet_and_their_keepers_are_told_of_each_other(town: Town) -> None:
    for node in town.nodes:
        [started] = node.room.journal.of("job-started")
        assert ": 1 rank on each of 2 nodes of `" in started.why
        assert set(node.processes.living) == {0}
        [told] = node.room.keepers.box.of(BeginMesh)
        assert len(told.mesh.members) == 2
    places = [node.processes.started[0][0] for node in town.nodes]
    assert sorted(place.first_rank for place in places) == [0, 1]


def test_what_fails_on_one_node_restarts_the_others(town: Town) -> None:
    first, second = town.nodes
    second.end(0, 1, "ValueError: no")
    town.pass_s(3)
    for node in town.nodes:
        assert [place.attempt for place, _, _ in node.processes.started] == [0, 1]
    assert first.processes.killed == [{0}]


def test_an_error_of_any_length_reaches_the_other_nodes(town: Town) -> None:
    first, second = town.nodes
    second.end(0, 1, f"ValueError: {'no ' * 5000}")
    town.pass_s(3)
    assert [place.attempt for place, _, _ in first.processes.started] == [0, 1]
    assert first.outcome == second.outcome == []


def test_all_nodes_wait_before_a_restart_when_those_before_it_were_in_vain(town: Town) -> None:
    second = town.nodes[1]
    for _ in range(3):
        second.end(0, -9)
        town.pass_s(3)
    assert [len(node.processes.started) for node in town.nodes] == [4, 4]
    second.end(0, -9)
    town.pass_s(0.45)  # each node's room moves the time that they share
    assert [len(node.processes.started) for node in town.nodes] == [4, 4]
    assert not [key for key in town.table.values if key.startswith("4/")], "nobody has come yet"
    town.pass_s(3)
    assert [node.processes.started[-1][0].attempt for node in town.nodes] == [4, 4]
    for node in town.nodes:
        *_, told = node.room.journal.of("ranks-restarted")
        assert " in 1.00 s: the restarts before this one brought no new step" in told.why


def test_ranks_that_stay_are_told_where_to_meet_when_the_keeper_knows_the_mesh(
    town: Town,
) -> None:
    first, second = town.nodes
    box = first.connect(0)
    second.connect(0)
    second.end(0, -9)
    town.pass_s(3)
    mesh = first.room.keepers.box.of(BeginMesh)[-1].mesh
    assert box.sent == [], "its keeper might take what it asks for the mesh before"
    first.room.keepers.box.says(MeshKnown(mesh.version))
    assert [type(message) for message in box.sent] == [RegroupAt]


def refuse(node: Node, is_mesh_known: bool = True) -> None:
    """As the node's keeper says it to all who asked where to resume."""
    keeper = node.room.keepers.box
    if is_mesh_known:
        keeper.says(MeshKnown(keeper.of(BeginMesh)[-1].mesh.version))
    keeper.says(VoteRefused("memory is of 3 ranks", is_final=True))


@pytest.fixture
def smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Town:
    """Two of three nodes, after they went on without the third."""
    monkeypatch.setattr(meeting, "BEGINS_NS", 0)
    town = Town(tmp_path, 3, min_nodes=2)
    town.begin(missing=1)
    assert [node.processes.started[-1][0].nodes for node in town.nodes] == [2, 2]
    return town


def test_what_more_nodes_could_resume_waits_for_them_and_says_so_once(smaller: Town) -> None:
    refuse(smaller.nodes[0])
    smaller.pass_s(5)
    assert all(len(node.processes.started) == 1 for node in smaller.nodes)
    assert all(node.outcome == [] and node.processes.living == {} for node in smaller.nodes)
    [told] = [
        event
        for node in smaller.nodes
        for event in node.room.journal.of("nodes-awaited")
        if "least" in event.data
    ]
    assert "memory is of 3 ranks" in told.why and "at least 3 of its 3 nodes" in told.why
    smaller.come(2)
    smaller.pass_s(3)
    assert [node.processes.started[-1][0].nodes for node in smaller.nodes] == [3, 3, 3]
    refuse(smaller.nodes[2])
    smaller.pass_s(10)
    for node in smaller.nodes:
        node.clean_up()
    smaller.pass_s(10)
    assert {node.outcome[0] for node in smaller.nodes} == {CODE_REFUSED}


def test_a_refusal_from_before_the_keeper_knows_the_nodes_is_of_the_attempt_before(
    smaller: Town,
) -> None:
    refuse(smaller.nodes[0], is_mesh_known=False)
    smaller.pass_s(10)
    assert all(node.processes.living == {0: 1001} for node in smaller.nodes)


def test_a_lost_node_has_the_others_meet_again_and_a_replacement_is_asked_for(town: Town) -> None:
    first = town.nodes[0]
    mesh = first.room.keepers.box.of(BeginMesh)[-1].mesh
    first.room.keepers.box.says(PeerDead(mesh.version - 1, 1, "of a mesh before"))
    assert first.room.provider.asked == []
    first.room.keepers.box.says(PeerDead(mesh.version, 1, "away for 10 s"))
    town.pass_s(1)
    assert [lost.node for lost in first.room.provider.asked] == [1]
    assert first.processes.killed == [{0}]
    assert len(first.room.journal.of("attempt-wanted")) == 1


def test_a_job_of_several_nodes_ends_when_all_have_ended_well(town: Town) -> None:
    first, second = town.nodes
    first.end(0, 0)
    town.pass_s(1)
    assert not first.room.journal.of("job-ended")
    second.end(0, 0)
    town.pass_s(3)
    for node in town.nodes:
        node.clean_up()
    town.pass_s(1)
    assert [node.outcome for node in town.nodes] == [[0], [0]]


def test_a_job_that_one_node_gives_up_ends_on_all_with_its_code(town: Town) -> None:
    first, second = town.nodes
    second.agent.signalled(SIGTERM)
    town.pass_s(1)
    assert first.processes.signals == [SIGTERM]
    for node in town.nodes:
        node.end(0, -SIGTERM)
    town.pass_s(3)
    for node in town.nodes:
        node.clean_up()
    town.pass_s(20)
    assert [node.outcome for node in town.nodes] == [[128 + SIGTERM]] * 2


def test_a_keeper_that_cannot_listen_is_no_beginning(tmp_path: Path) -> None:
    node = Node(AgentRoom(tmp_path, 1, 2)).begin()
    node.room.keepers.box.says(CannotListen("taken"))
    assert len(node.outcome) == 1 and isinstance(node.outcome[0], KeeperError)


def test_a_node_with_a_slow_rank_leaves_its_place_to_the_spare_that_waits(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    town.come(2)
    town.pass_s(3)
    spare = town.nodes[2]
    assert spare.processes.started == []
    lived = town.nodes[1]
    slow = lived.agent._enforcer._slow
    assert slow is not None
    why = iter(["rank 1 has cost 60.00 s"])
    monkeypatch.setattr(slow, "tick", lambda now_ns: next(why, ""))
    town.pass_s(20)
    assert [place.attempt for place, _, _ in spare.processes.started] == [1]
    assert [place.attempt for place, _, _ in town.nodes[0].processes.started] == [0, 1]
    assert [place.attempt for place, _, _ in lived.processes.started] == [0]
    assert set(lived.processes.living) == set() and lived.outcome == []


def test_why_a_spare_cannot_have_this_nodes_place(
    node: Node, town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.begin()
    assert node.agent._why_no_swap() == "the job has one node"
    one = town.nodes[0].agent
    assert "cannot do without" in one._why_no_swap()
    monkeypatch.setattr(one, "_is_expendable", lambda: True)
    assert one._why_no_swap() == ""
    one._has_left = True
    assert "once before" in one._why_no_swap()
