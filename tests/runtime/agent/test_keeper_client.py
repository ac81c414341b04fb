"""AgentKeeperClient: every keeper is told the same as the one before it, training never stops for
it, and in the end the memory is cleaned up or somebody says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import KeeperError, KeepstepError
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.keeper_agent import (
    AgentHere,
    JobEnded,
    MemoryKept,
    MeshKnown,
    PeerDead,
    StillWriting,
)
from keepstep.model.messages.keeper_rank import (
    AreYouThere,
    BeginMesh,
    CannotListen,
    Listen,
    Listening,
    NotUnderstood,
    StillHere,
    VoteRefused,
)
from keepstep.model.units import S_NS
from keepstep.runtime.agent.keeper_client import (
    DYING_NS,
    LISTEN_WITHIN_NS,
    SEARCH_AGAIN_NS,
    AgentKeeperClient,
)
from keepstep.runtime.keeper_watch import ASKED_AFTER_LOOKS, GIVEN_UP_AFTER_LOOKS, LOOK_NS
from tests.runtime.fakes import AgentRoom, FakeBox

MESH = Mesh(5, 1, (Member(0, "a", 1, 10, 2), Member(1, "host0", 2, 20, 2)), "secret")
WITHIN_NS = 1_000
GIVEN_UP_NS = GIVEN_UP_AFTER_LOOKS * LOOK_NS


class Line:
    def __init__(self, home: Path) -> None:
        self.room = AgentRoom(home)
        self.heard: list[object] = []
        self.missing: list[KeepstepError] = []
        self.over = 0
        self.client = AgentKeeperClient(self.room.world, self.room.options.job_dir, self)
        self.client.connect(lambda: self.heard.append("found"), self.missing.append)

    def peer_dead(self, mesh_version: int, node: int, why: str) -> None:
        self.heard.append((mesh_version, node, why))

    def mesh_known(self, mesh_version: int) -> None:
        self.heard.append(mesh_version)

    def restore_refused(self, why: str) -> None:
        self.heard.append(why)

    def listen(self) -> list[str | None]:
        answers: list[str | None] = []
        self.client.listen("host0", answers.append)
        return answers

    def end(self) -> None:
        self.client.end(True, "well", WITHIN_NS, self._over)

    def _over(self) -> None:
        self.over += 1

    @property
    def box(self) -> FakeBox:
        return self.room.keepers.box


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def test_a_job_without_a_keeper_does_not_begin(tmp_path: Path) -> None:
    room = AgentRoom(tmp_path)
    room.keepers.error = KeeperError("none")
    missing: list[KeepstepError] = []
    client = AgentKeeperClient(room.world, room.options.job_dir, None)  # type: ignore[arg-type]
    client.connect(lambda: pytest.fail("found"), missing.append)
    assert missing == [room.keepers.error]


def test_what_the_keeper_says_reaches_the_agent(line: Line) -> None:
    assert line.box.sent == [AgentHere(500)] and line.heard == ["found"]
    refusal = VoteRefused("another world size", is_final=True)
    for message in (PeerDead(5, 1, "away"), MeshKnown(5), refusal, NotUnderstood("what")):
        line.box.says(message)
    assert line.heard[1:] == [(5, 1, "away"), 5, "another world size"]
    assert line.room.journal.kinds == ["not-understood"]


@given(st.lists(st.sampled_from(["die", "none", "same", "time"]), max_size=15))
def test_whatever_becomes_of_keepers_the_next_one_is_told_everything(
    tmp_path_factory: pytest.TempPathFactory, story: list[str]
) -> None:
    line = Line(tmp_path_factory.mktemp("k"))
    line.listen()
    line.box.says(Listening("host0", 2, 20, -1))
    line.client.begin_mesh(MESH)
    for what in story:
        keepers = line.room.keepers
        if what == "die" and line.box.is_open:
            line.box.dies()
        elif what == "none":
            keepers.error = KeeperError("none")
        elif what == "same":  # a dying process can still be connected to
            keepers.next_pids.append(line.box.pid)
        else:
            keepers.error = None
            line.room.time.pass_ns(SEARCH_AGAIN_NS)
    line.room.keepers.error = None
    line.room.keepers.next_pids.clear()
    line.room.time.pass_ns(2 * SEARCH_AGAIN_NS)
    box = line.box
    assert box.is_open and box.of(AgentHere) == [AgentHere(500)]
    assert box.of(Listen)[-1].host == "host0"
    box.says(Listening("host0", 9, 99, -1))
    told = box.of(BeginMesh)[-1].mesh
    assert told.members == (MESH.members[0], Member(1, "host0", 9, 99, 2)), "its own life"


def test_a_keeper_that_is_just_dying_is_not_taken_for_the_next_one(line: Line) -> None:
    line.room.keepers.next_pids.append(line.box.pid)
    line.box.dies()
    assert not line.box.is_open and line.room.journal.kinds == []
    line.room.time.pass_ns(DYING_NS)
    assert line.room.journal.kinds == ["keeper-restarted"]


@pytest.mark.parametrize("answer", [Listening("host0", 2, 20, -1), CannotListen("taken"), None])
def test_where_the_keeper_listens_or_why_it_cannot(
    line: Line, answer: Listening | CannotListen | None
) -> None:
    answers = line.listen()
    if answer is not None:
        line.box.says(answer)
    line.room.time.pass_ns(LISTEN_WITHIN_NS)
    [found] = answers
    if isinstance(answer, Listening):
        assert found is None and line.client.listens == answer
    else:
        assert found is not None and ("taken" in found) == (answer is not None)


def test_a_keeper_that_dies_over_its_answer_is_followed_by_one_that_is_asked_again(
    line: Line,
) -> None:
    answers = line.listen()
    line.box.dies()
    assert [asked.host for asked in line.box.of(Listen)] == ["host0"]
    line.box.says(Listening("host0", 2, 20, -1))
    line.room.time.pass_ns(LISTEN_WITHIN_NS)
    assert answers == [None]


def test_a_keeper_that_cannot_listen_where_the_one_before_did_takes_another_port(
    line: Line,
) -> None:
    line.listen()
    line.box.says(Listening("host0", 2, 20, -1))
    line.box.dies()
    line.box.says(CannotListen("taken"))
    assert [asked.port for asked in line.box.of(Listen)] == [2, 0]
    line.box.says(CannotListen("taken"))
    assert len(line.box.of(Listen)) == 2, "there is no other way"
    assert line.room.journal.of("keeper-unheard")


# -- the end


def test_the_end_is_over_when_the_keeper_has_cleaned_up_and_gone(line: Line) -> None:
    keeper = line.box
    line.end()
    assert keeper.of(JobEnded) == [JobEnded(True, "well")] and line.over == 0
    line.room.options.job_dir.rmdir()
    line.box.dies()
    line.room.time.pass_ns(2 * WITHIN_NS)
    assert line.over == 1 and line.room.journal.kinds == [], "nothing comes late"


def test_where_no_keeper_is_left_another_one_is_told_the_last_word(line: Line) -> None:
    first = line.box
    first.dies()
    line.end()
    line.room.time.pass_ns(S_NS)
    assert line.box is not first and line.box.of(JobEnded) == [JobEnded(True, "well")]


def test_a_keeper_that_dies_before_it_has_cleaned_up_is_followed_by_one_that_does(
    line: Line,
) -> None:
    (line.room.options.job_dir / "slot-0").touch()
    line.end()
    line.box.dies()
    assert line.box.sent == [AgentHere(500), JobEnded(True, "well")] and line.over == 0


def test_without_anybody_to_clean_up_the_way_to_do_it_is_told(line: Line) -> None:
    (line.room.options.job_dir / "slot-0").touch()
    line.room.keepers.error = KeeperError("none")
    line.end()
    line.box.dies()
    assert line.over == 1 and "keepstep clean" in line.room.journal.events[-1].why


def test_memory_that_is_kept_is_told_and_ends_the_waiting(line: Line) -> None:
    line.box.says(MemoryKept("too early"))
    line.end()
    line.box.says(MemoryKept("kept for 60 s"))
    assert line.over == 1 and line.room.told.shown == ["keepstep: kept for 60 s"]


def test_a_busy_keeper_is_not_waited_for(line: Line) -> None:
    line.end()
    line.room.time.pass_ns(WITHIN_NS)
    assert line.over == 1 and line.room.journal.kinds == ["keeper-busy"]
    assert line.room.journal.events[-1].why.endswith("goes on by itself: it cleans up")
    line.box.dies()
    assert line.over == 1


def test_of_a_keeper_that_writes_on_it_is_told_what_it_writes(line: Line) -> None:
    line.end()
    line.box.says(StillWriting("it writes step 3"))
    line.room.time.pass_ns(WITHIN_NS)
    assert line.room.journal.events[-1].why.endswith("goes on by itself: it writes step 3")


@pytest.mark.parametrize("waits_for", ["nothing", "listening", "mesh", "end"])
def test_a_keeper_that_hangs_is_ended_whether_it_is_waited_for_or_not(
    line: Line, waits_for: str
) -> None:
    if waits_for == "end":
        line.client.end(True, "well", 2 * GIVEN_UP_NS, line._over)
    elif waits_for != "nothing":
        line.listen()
    if waits_for == "mesh":
        line.box.says(Listening("host0", 2, 20, -1))
        line.client.begin_mesh(MESH)
    hanging = line.box
    line.room.time.pass_ns(GIVEN_UP_NS - 1)
    assert not line.room.keepers.ended
    line.room.time.pass_ns(1)
    assert line.room.keepers.ended == [hanging] and "keeper-stuck" in line.room.journal.kinds
    if waits_for == "end":
        assert line.box.of(JobEnded) == [JobEnded(True, "well")]
    else:
        assert line.box is not hanging and AgentHere(500) in line.box.sent
    if waits_for in ("listening", "mesh"):
        assert line.box.of(Listen)[-1].host == "host0"


def test_a_keeper_that_answers_is_left_alone(line: Line) -> None:
    keeper = line.box
    for asked in range(1, 100):
        line.room.time.pass_ns(ASKED_AFTER_LOOKS * LOOK_NS)
        assert len(keeper.of(AreYouThere)) == asked
        keeper.says(StillHere())
    assert not line.room.keepers.ended


def test_an_agent_that_was_stopped_with_its_keeper_ends_nobody(line: Line) -> None:
    """As when the whole machine was suspended: what counts is how often the agent has looked."""
    for _ in range(GIVEN_UP_AFTER_LOOKS - 1):
        line.room.time.now_ns += 10 * GIVEN_UP_NS
        line.room.time.pass_ns()
    assert not line.room.keepers.ended


def test_nobody_looks_when_the_job_is_over(line: Line) -> None:
    line.end()
    line.room.time.pass_ns(WITHIN_NS)
    line.room.time.pass_ns(10 * GIVEN_UP_NS)
    assert line.over == 1 and not line.room.keepers.ended
