"""KeeperClient: every question is answered, also when the keeper dies; the next one is told who
trains, or asked again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import KeeperError, KeepstepError
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.keeper_rank import (
    AreYouThere,
    Attach,
    BeginMesh,
    CannotListen,
    CheckpointDone,
    Goodbye,
    HaltOrder,
    HaltWord,
    JoinVote,
    Listen,
    Listening,
    NotUnderstood,
    PageChanged,
    Released,
    SlotDamaged,
    StateLoaded,
    StateOffered,
    StateUnusable,
    StillHere,
    TrainingPermitted,
    VoteRefused,
    WantCheckpoint,
)
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.runtime.keeper_watch import GIVEN_UP_AFTER_LOOKS, LOOK_NS
from keepstep.runtime.rank.keeper_client import (
    LISTEN_WITHIN_NS,
    SEARCH_AGAIN_NS,
    KeeperClient,
)
from tests.runtime.fakes import RankRoom

GIVEN_UP_NS = GIVEN_UP_AFTER_LOOKS * LOOK_NS
OFFER = StateOffered(4, "memory", 7, 1, "all hold it")
JOIN = JoinVote(rank=1, world_size=2, incarnation=1, holds=())
GO = TrainingPermitted(2, 4, "memory", Stamp(7, 1), 0, "why")


class Hearer:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def offered(self, offer: StateOffered) -> None:
        self.heard.append(offer)

    def permitted(self, epoch: int, offer: int, loss: str) -> None:
        self.heard.append((epoch, offer))

    def refused(self, why: str, is_final: bool = False) -> None:
        self.heard.append(why)

    def halt_ordered(self, order: HaltOrder) -> None:
        self.heard.append(order)

    def slot_damaged(self, index: int, why: str) -> None:
        self.heard.append((index, why))

    def released(self) -> None:
        self.heard.append("released")


class Line:
    """A client that has found its keeper."""

    def __init__(self, home: Path) -> None:
        self.room = RankRoom(home, rank=1, ranks=2)
        self.client = KeeperClient(self.room.world, 1, 2)
        self.hearer = self.client.hearer = Hearer()
        self.found = 0
        self.missing: list[KeepstepError] = []
        self.answers: list[CheckpointDone] = []
        self.client.connect(self._find, self.missing.append)

    def _find(self) -> None:
        self.found += 1

    def persist(self) -> None:
        self.client.persist(3, "asked", self.answers.append)


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def test_without_a_keeper_there_is_no_beginning(tmp_path: Path) -> None:
    room = RankRoom(tmp_path)
    room.keepers.error = KeeperError("none")
    missing: list[KeepstepError] = []
    KeeperClient(room.world, 0, 1).connect(lambda: pytest.fail("found"), missing.append)
    assert missing == [room.keepers.error]


STORIES = st.lists(st.sampled_from(["ask", "answer", "die", "no keeper", "time"]), max_size=20)


@given(STORIES)
def test_every_checkpoint_that_is_asked_for_is_answered_once(
    tmp_path_factory: pytest.TempPathFactory, story: list[str]
) -> None:
    line = Line(tmp_path_factory.mktemp("r"))
    asked = 0
    for what in story:
        box = line.room.keepers.box
        if what == "ask":
            asked += 1
            line.persist()
        elif what == "answer" and box.is_open:
            waiting = box.of(WantCheckpoint)
            for want in waiting[-1:]:
                box.says(CheckpointDone(want.ticket, True, 3, "written"))
        elif what == "die" and box.is_open:
            box.dies()
        elif what == "no keeper":
            line.room.keepers.error = KeeperError("none")
        else:
            line.room.keepers.error = None
            line.room.time.pass_ns(SEARCH_AGAIN_NS)
    if line.room.keepers.box.is_open:
        line.room.keepers.box.dies()
    assert len(line.answers) == asked
    assert len({answer.ticket for answer in line.answers}) == asked


def test_a_keeper_that_takes_over_is_told_who_trains(line: Line) -> None:
    line.room.keepers.box.dies()
    assert line.room.keepers.box.sent == [Attach(1, 2)]
    assert line.room.journal.kinds == ["keeper-lost"]


def test_a_keeper_that_takes_over_is_asked_again_while_the_vote_is_on(line: Line) -> None:
    line.client.join(JOIN)
    line.room.keepers.box.dies()
    assert line.room.keepers.box.sent == [JOIN]
    line.client.leave_vote()
    line.room.keepers.box.dies()
    assert line.room.keepers.box.sent == [Attach(1, 2)]


def test_a_keeper_that_takes_over_hears_what_the_one_before_was_told(line: Line) -> None:
    line.client.join(JOIN)
    line.client.loaded(OFFER)
    line.room.keepers.box.dies()
    assert line.room.keepers.box.sent == [JOIN, StateLoaded(1, 4)]
    line.room.keepers.box.says(GO)
    line.client.leave_vote()
    line.room.keepers.box.dies()
    assert line.room.keepers.box.sent == [Attach(1, 2, GO)]


def test_a_keeper_that_takes_over_hears_of_the_step_where_this_rank_stands(line: Line) -> None:
    stands = HaltWord(1, 2, 3, 16, 1, "stands", "seen")
    elsewhere = HaltWord(1, 2, 3, 8, 1, "leaves")
    line.client.say_of_halt(stands, is_kept=True)
    line.client.say_of_halt(elsewhere, is_kept=False)
    asked = AreYouThere()  # nothing else need be said before all stand there
    assert line.room.keepers.box.sent[-3:] == [stands, asked, elsewhere]
    assert line.client.is_halt_unheard
    line.room.keepers.box.says(StillHere())
    assert not line.client.is_halt_unheard
    line.room.keepers.box.dies()
    assert line.room.keepers.box.sent == [Attach(1, 2), stands]
    line.client.forget_halt()
    line.room.keepers.box.dies()
    assert line.room.keepers.box.sent == [Attach(1, 2)]


def test_orders_are_heard_by_who_is_in_no_vote(line: Line) -> None:
    order = HaltOrder(3, 16, 1, "halt")
    line.room.keepers.box.says(order)
    assert line.hearer.heard == [order]


def test_what_is_loaded_counts_until_another_offer_is(line: Line) -> None:
    line.client.join(JOIN)
    line.client.loaded(OFFER)
    line.room.keepers.box.says(StateOffered(5, "memory", 7, 1, "all hold it"))
    line.room.keepers.box.says(GO)
    line.room.keepers.box.dies()
    assert line.room.keepers.box.sent == [JOIN]
    line.client.leave_vote()
    line.room.keepers.box.dies()
    assert line.room.keepers.box.sent == [Attach(1, 2)]


def test_a_keeper_is_searched_until_there_is_one(line: Line) -> None:
    line.room.keepers.error = KeeperError("none")
    line.room.keepers.box.dies()
    line.room.time.pass_ns(3 * SEARCH_AGAIN_NS)
    assert len(line.room.journal.of("keeper-missing")) == 4
    line.room.keepers.error = None
    line.room.time.pass_ns(SEARCH_AGAIN_NS)
    assert line.room.keepers.box.sent == [Attach(1, 2)]


def test_what_is_heard_about_a_vote_counts_while_it_is_on(line: Line) -> None:
    box = line.room.keepers.box
    for message in (OFFER, GO, VoteRefused("no")):
        box.says(message)
    assert line.hearer.heard == []
    line.client.join(JOIN)
    for message in (OFFER, GO, VoteRefused("no"), NotUnderstood("what")):
        box.says(message)
    assert line.hearer.heard == [OFFER, (2, 4), "no", "what"]
    line.client.loaded(OFFER)
    line.client.unusable(OFFER, "y" * 5000, unread=False)
    assert box.sent[-2:] == [StateLoaded(1, 4), StateUnusable(1, 4, "y" * 1000)]


def test_what_happens_during_training(line: Line) -> None:
    box = line.room.keepers.box
    line.client.page_changed()
    assert box.poked == [PageChanged(1)]
    box.says(SlotDamaged(2, "block 3"))
    assert line.hearer.heard == [(2, "block 3")]


@pytest.mark.parametrize("end", ["heard", "died"])
def test_a_goodbye_is_released_by_the_keepers_answer_or_its_death(line: Line, end: str) -> None:
    line.client.goodbye(True, "well")
    assert line.room.keepers.box.of(Goodbye) == [Goodbye(1, True, "well")]
    assert line.hearer.heard == []
    if end == "heard":
        line.room.keepers.box.says(Released())
    else:
        line.room.keepers.box.dies()
    assert line.hearer.heard == ["released"] and line.room.keepers.searches == 1


def test_a_goodbye_that_nobody_can_hear_is_released_at_once(line: Line) -> None:
    line.room.keepers.error = KeeperError("none")
    line.room.keepers.box.dies()
    line.client.goodbye(True, "well")
    assert line.hearer.heard == ["released"]


def test_who_has_hung_up_searches_no_more(line: Line) -> None:
    box = line.room.keepers.box
    line.client.close()
    assert not box.is_open
    box.dies()
    line.room.time.pass_ns(SEARCH_AGAIN_NS)
    assert line.room.keepers.searches == 1


# -- without an agent

MESH = Mesh(5, 1, (Member(0, "a", 1, 10, 1), Member(1, "b", 2, 20, 1)), "secret")


def test_a_keeper_that_cannot_listen_or_does_not_answer(line: Line) -> None:
    heard: list[Listening | str] = []
    line.client.listen_at("b", 0, heard.append)
    line.room.keepers.box.says(CannotListen("taken"))
    line.room.time.pass_ns(LISTEN_WITHIN_NS)
    assert heard == ["taken"]
    line.client.listen_at("b", 0, heard.append)
    line.room.time.pass_ns(LISTEN_WITHIN_NS)
    assert heard[1:] == [f"it did not answer within {LISTEN_WITHIN_NS // S_NS} s"]


def listens(line: Line) -> None:
    me = MESH.members[MESH.node]
    line.client.listen_at("b", 0, lambda answer: None)
    line.room.keepers.box.says(Listening(me.host, me.port, me.incarnation, 0))


@pytest.mark.parametrize("answers_first", [False, True])
def test_one_that_takes_over_while_the_nodes_meet_listens_where_the_others_look_for_it(
    line: Line, answers_first: bool
) -> None:
    """It was told of the mesh before it listened, refused it, and all waited without an end."""
    listens(line)
    line.room.keepers.box.dies()
    box = line.room.keepers.box
    assert box.sent == [Listen("b", 2, MESH.members[MESH.node].incarnation)]
    if answers_first:
        box.says(Listening("b", 2, 30, 4))
        line.client.begin_mesh(MESH)
    else:
        line.client.begin_mesh(MESH)
        assert not box.of(BeginMesh)
        box.says(Listening("b", 2, 30, 4))
    [told] = box.of(BeginMesh)
    assert told.mesh.members == (MESH.members[0], Member(1, "b", 2, 30, 1))


def test_a_keeper_that_takes_over_is_told_the_mesh_with_its_own_life_in_it(line: Line) -> None:
    listens(line)
    line.client.begin_mesh(MESH)
    line.room.keepers.box.dies()
    box = line.room.keepers.box
    assert box.sent == [Listen("b", 2, MESH.members[MESH.node].incarnation)]
    box.says(Listening("b", 7, 30, 4))
    [told] = box.of(BeginMesh)
    assert told.mesh.members == (MESH.members[0], Member(1, "b", 7, 30, 1))
    assert box.sent[-1] == Attach(1, 2)


def test_a_keeper_that_hangs_over_the_vote_is_ended_and_the_next_one_asked(line: Line) -> None:
    hanging = line.room.keepers.box
    line.client.join(JOIN)
    assert not line.client.is_silent
    line.room.time.pass_ns(GIVEN_UP_NS - LOOK_NS)
    assert line.client.is_silent
    line.room.time.pass_ns(LOOK_NS)
    assert line.room.keepers.ended == [hanging] and not line.client.is_silent
    assert line.room.keepers.box.sent == [JOIN]
    assert line.room.journal.kinds == ["keeper-stuck", "keeper-lost"]


def test_a_keeper_that_answers_may_take_its_time(line: Line) -> None:
    line.client.join(JOIN)
    line.persist()
    for _ in range(20):
        line.room.time.pass_ns(GIVEN_UP_NS - LOOK_NS)
        assert line.room.keepers.box.sent[-1] == AreYouThere()
        line.room.keepers.box.says(StillHere())
    assert not line.room.keepers.ended and not line.answers


def test_nobody_is_asked_for_a_sign_of_life_while_the_rank_trains(line: Line) -> None:
    line.client.join(JOIN)
    line.client.loaded(OFFER)
    line.room.keepers.box.says(GO)
    line.client.leave_vote()
    line.room.time.pass_ns(10 * GIVEN_UP_NS)
    assert not line.room.keepers.ended and not line.room.keepers.box.of(AreYouThere)


def test_a_keeper_that_hangs_over_a_checkpoint_answers_by_its_end(line: Line) -> None:
    line.persist()
    line.room.time.pass_ns(GIVEN_UP_NS)
    assert [answer.ok for answer in line.answers] == [False]
    assert line.room.keepers.box.sent == [Attach(1, 2)]


def test_a_keeper_that_hangs_over_listening_is_followed_by_one_that_is_asked(line: Line) -> None:
    answers: list[Listening | str] = []
    line.client.listen_at("a", 0, answers.append)
    line.room.time.pass_ns(GIVEN_UP_NS)
    assert line.room.keepers.box.sent == [Listen("a", 0)], "and not told that this rank trains"
    line.room.keepers.box.says(Listening("a", 5, 10, -1))
    assert answers == [Listening("a", 5, 10, -1)]
