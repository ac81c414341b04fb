"""Enforcer: a condemned rank is killed once a life, and every end is explained once, as all nodes
are to know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage
from keepstep.edge.shm.step_work_page import StepWorkWriter, work_path
from keepstep.model.diagnosis import Diagnosis, Strength
from keepstep.model.failure import Cause
from keepstep.model.launch import ErrorReport, RankAssignment, RankEnd
from keepstep.model.messages.agent_rank import RankHere, TrainingEnded
from keepstep.model.node_steps import SlowWord, node_steps_from_text, slow_word_to_text
from keepstep.model.restarts import AttemptWanted, Event, RanksUndead
from keepstep.model.snapshot import Phase
from keepstep.model.step_work import Section, StepWork, Timing
from keepstep.model.units import S_NS
from keepstep.runtime.agent.enforcer import Enforcer
from keepstep.runtime.agent.evidence_board import EvidenceBoard
from keepstep.runtime.agent.monitor import Monitor
from keepstep.runtime.agent.rank_server import RankServer
from keepstep.runtime.agent.steps_board import StepsBoard
from tests.runtime.agent.test_rank_server import Hearer
from tests.runtime.fakes import AgentRoom, FakeBox, FakeKV, Table

PLACE = RankAssignment(0, 1, 2, 2, 4, "h", 1)  # of node 1: ranks 2 and 3


def hang(culprit: int | None) -> Diagnosis:
    return Diagnosis(
        kind="hang",
        scope="job" if culprit is None else "rank",
        culprit=culprit,
        node=1,
        state="spinning",
        strength=Strength.ABSENCE,
        why=f"rank {culprit} hangs",
        stalled_ns=5,
    )


class Node:
    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = AgentRoom(home)
        self.room.change(devices=("gpu-a", "gpu-b"))
        path = self.room.options.job_dir / "agent.sock"
        self.server = RankServer(path, self.room.world.serve_boxes, Hearer())
        self.server.open()
        self.found: list[Diagnosis] = []
        monkeypatch.setattr(Monitor, "tick", lambda monitor, now_ns: self._take())
        self.enforcer = Enforcer(self.room.world, self.room.options, self.server)
        pids = self.room.processes.start(PLACE, {0, 1}, {})
        self.pids = {PLACE.first_rank + rank: pid for rank, pid in pids.items()}
        self.enforcer.begin(PLACE, self.pids, None)

    def _take(self) -> Sequence[Diagnosis]:
        found, self.found = self.found, []
        return found

    def look(self, *found: Diagnosis) -> list[Event]:
        self.found = list(found)
        return list(self.enforcer.look())

    def end(self, rank: int, code: int, message: str = "") -> RankEnd:
        return RankEnd(rank, self.pids[PLACE.first_rank + rank], code, ErrorReport(message))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_a_rank_that_hangs_is_killed_once_and_is_undead_the_second_time(node: Node) -> None:
    assert node.look(hang(3)) == [] and node.room.processes.killed == [{1}]
    assert node.look(hang(3)) == [RanksUndead((3,))] and node.room.processes.killed == [{1}]
    assert [e.data["kind"] for e in node.room.journal.of("diagnosis")] == ["hang", "hang"]


def test_a_new_attempt_condemns_anew(node: Node) -> None:
    node.look(hang(3))
    node.enforcer.prepare()
    node.enforcer.begin(PLACE, node.pids, None)
    assert node.look(hang(3)) == [] and node.room.processes.killed == [{1}, {1}]


def test_where_it_is_nobody_in_particular_all_start_anew(node: Node) -> None:
    [wanted] = node.look(hang(None))
    assert isinstance(wanted, AttemptWanted) and wanted.failure is not None
    assert (wanted.failure.cause, wanted.failure.host) == (Cause.HANG, "host0")
    assert node.room.processes.killed == []


def test_a_rank_that_has_gone_meanwhile_is_not_killed(node: Node) -> None:
    del node.room.processes.living[1]
    assert node.look(hang(3)) == [] and node.room.processes.killed == []


def test_an_end_with_an_error_is_a_failure_that_all_nodes_can_compare(node: Node) -> None:
    found = node.enforcer.explain(node.end(1, 1, "ValueError: no at 0x7f00"))
    assert (found.rank, found.code) == (3, 1) and found.failure is not None
    failure = found.failure
    assert (failure.cause, failure.rank, failure.host, failure.device) == (
        Cause.CRASH,
        3,
        "host0",
        "gpu-b",
    )
    assert "0x7f00" not in failure.error and failure.error.startswith("ValueError: no")
    assert node.enforcer.failures == [found]
    [told] = node.room.journal.of("rank-exited")
    assert told.data["rank"] == 3 and told.data["pid"] == node.pids[3] and told.data["code"] == 1


def test_what_the_errors_words_mean_stands_beside_its_end_and_decides_nothing(node: Node) -> None:
    words = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    room = node.room
    found = node.enforcer.explain(node.end(1, 1, words))
    assert found.failure is not None and found.failure.cause is Cause.OOM
    [told] = room.journal.of("rank-exited")
    assert (told.data["failure_class"], told.data["role"]) == ("gpu-memory", "root")
    assert told.why.endswith("; a GPU's memory was full; cheapest: lower memory")
    assert "cheapest" not in f"{found}", "the other nodes hear what they heard"


def test_an_end_that_others_caused_and_one_by_a_signal_are_told_as_before(node: Node) -> None:
    node.enforcer.explain(node.end(1, 1, "RuntimeError: Connection closed by peer [h]:1"))
    node.enforcer.explain(node.end(0, -9))
    told, killed = node.room.journal.of("rank-exited")
    assert (told.data["failure_class"], told.data["role"]) == ("lost-rank", "cascade")
    assert "failure_class" not in killed.data and "cheapest" not in told.why + killed.why


def test_a_good_end_is_no_failure(node: Node) -> None:
    box = FakeBox(node.pids[2], node.server)
    box.says(RankHere(2, node.pids[2]))
    for rank in (0, 1):
        box = FakeBox(node.pids[2 + rank], node.server)
        box.says(TrainingEnded(2 + rank))
    node.room.probes.states[node.pids[3]] = "gone"
    found = node.enforcer.explain(node.end(0, 0))
    assert found.code == 0 and found.failure is None and node.enforcer.failures == []


def test_who_had_ended_its_training_well_may_die_of_a_signal(node: Node) -> None:
    FakeBox(node.pids[2], node.server).says(TrainingEnded(2))
    node.room.probes.states[node.pids[3]] = "gone"
    found = node.enforcer.explain(node.end(0, -11))
    assert found.code == 0 and node.room.journal.of("late-death")


def test_who_leaves_while_others_run_has_failed(node: Node) -> None:
    page = StatusPage.own(MEMORY, node.room.options.job_dir, 2)
    assert page is not None
    page.publish(rank=2, world_size=4, pid=node.pids[2], phase=Phase.FORWARD, step=7)
    found = node.enforcer.explain(node.end(0, 0))
    assert found.code == 1 and found.failure is not None and found.failure.step == 7
    page.close()


def test_who_was_condemned_ends_for_that(node: Node) -> None:
    node.look(hang(3))
    found = node.enforcer.explain(node.end(1, -9))
    assert found.code == -9 and found.failure is not None
    assert len(node.room.journal.of("diagnosis")) == 1, "it has been told already"
    assert node.look(hang(3)) == [], "its life is over"


def test_ranks_that_train_and_show_no_steps_are_told_of(node: Node) -> None:
    """What they have completed is on their status pages, whatever they measure."""
    pages = [StatusPage.own(MEMORY, node.room.options.job_dir, rank) for rank in (2, 3)]
    for step in range(80):
        for rank, page in zip((2, 3), pages, strict=True):
            assert page is not None
            page.publish(
                rank=rank, world_size=4, pid=node.pids[rank], incarnation=1, completed_step=step
            )
        assert list(node.enforcer.look_at_steps()) == []
        node.room.time.pass_ns(S_NS // 2)
    learning, told = node.room.journal.of("slow-unknown")
    assert learning.data["doubt"] == "learning"
    assert told.data["doubt"] == "records" and "ranks 2, 3 did" in told.why
    for page in pages:
        assert page is not None
        page.close()


def test_where_there_are_other_nodes_its_ranks_steps_are_told_there(node: Node) -> None:
    room = node.room
    kv = FakeKV(room.time, Table())
    node.enforcer.begin(PLACE, node.pids, EvidenceBoard(lambda: kv, PLACE.attempt, PLACE.nodes))
    StepsBoard(lambda: kv, PLACE.attempt, 0, 2).say(slow_word_to_text(SlowWord(1, 1, 5)))
    pages = [
        StepWorkWriter(room.world.memory, work_path(room.options.job_dir, r)) for r in node.pids
    ]
    for page in pages:
        page.begin(Timing.HOST)
    heard: list[Mapping[int, str]] = []
    for step in range(200):
        took = (step * 10**7,) * len(Section)
        for page in pages:
            page.write(StepWork(step, 1, step * 10**8, took, took, 0, took, 0, 0))
        room.time.pass_ns(10**8)
        assert list(node.enforcer.look_at_steps()) == []
    StepsBoard(lambda: kv, PLACE.attempt, 0, 2).gather(heard.append)
    room.time.pass_ns()
    told = node_steps_from_text(heard[0][1])
    assert told.epoch == 1 and {2, 3} == set(told.blocks[max(told.blocks)])
    for page in pages:
        page.close()
    node.enforcer.close()
