"""Checkpoint requests: which step each waits for and what it is answered, with a persister that
answers when it is told to. What real persisters write is in test_checkpointing.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keepstep.core.resume.cut import Holding
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.checkpoint import Timeline
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.runtime.keeper.checkpointing import WITHIN_NS, Checkpointing
from tests.runtime.fakes import FakeBox, FakeJournal, FakeTime
from tests.runtime.replication.room import JOB_DIR, a_memory, seal

RANKS = 2


class Persister:
    """See `PersisterClient`."""

    def __init__(self) -> None:
        self.asked: list[tuple[CheckpointAct, Callable[[ActDone], None]]] = []
        self.is_urgent = False

    def hurry(self, is_urgent: bool) -> None:
        self.is_urgent = is_urgent

    def ask(self, act: CheckpointAct, answered: Callable[[ActDone], None]) -> None:
        self.asked.append((act, answered))


class Room:
    """One keeper's side, and what its ranks hold."""

    def __init__(self) -> None:
        self.memory, self.time, self.journal = a_memory(), FakeTime(), FakeJournal()
        self.persister = Persister()
        self.checkpoints = Checkpointing(
            JOB_DIR,
            self.memory,
            self.time,
            self.journal,
            self.persister,  # type: ignore[arg-type]
        )
        self.stamps: list[Stamp] = []

    def seal(self, step: int, epoch: int = 1) -> None:
        for rank in range(RANKS):
            seal(
                self.memory, JOB_DIR, rank, Stamp(step, epoch), b"x", RANKS, len(self.stamps)
            ).close()
        self.stamps.append(Stamp(step, epoch))

    def may_be_overwritten(self, rank: int, at: int = 0) -> bool:
        slot = Slot(self.memory, slot_path(JOB_DIR, rank, at))
        free = slot.lock(exclusive=True)
        slot.unlock()
        slot.close()
        return free

    def advance(self, decided: int | None = None, anybody: bool = True) -> None:
        newest = max((stamp.step for stamp in self.stamps), default=-1)
        held = Holding(frozenset(self.stamps), None, newest if decided is None else decided)
        self.checkpoints.advance([held] * RANKS, RANKS, anybody)

    def answer(
        self, ok: bool = True, why: str = "done", there: bool = False, hung: bool = False
    ) -> CheckpointAct:
        """To the oldest of what the persister was asked."""
        act, answered = self.persister.asked.pop(0)
        answered(ActDone(ok, why, there, hung))
        return act

    def write(self) -> list[str]:
        """Whatever it is asked works. The acts."""
        acts: list[str] = []
        while self.persister.asked:
            acts.append(self.answer().act)
        return acts


def heard(box: FakeBox) -> list[tuple[bool, int | None]]:
    return [(done.ok, done.step) for done in box.of(CheckpointDone)]


@pytest.fixture
def room() -> Room:
    return Room()


def test_the_newest_that_all_hold_is_written_and_all_who_asked_hear_of_it(room: Room) -> None:
    first, second, gone = FakeBox(1), FakeBox(2), FakeBox(3)
    for box, why in ((first, "every 10 steps"), (gone, "it wants one"), (second, "so does it")):
        room.checkpoints.ask(box, None, why)
    room.checkpoints.forget(gone)
    room.seal(3)
    room.seal(4)
    room.advance()
    [(act, _)] = room.persister.asked
    assert (act.act, act.step, act.ranks) == ("survey", 4, (RANKS,))
    assert not any(room.may_be_overwritten(rank, 1) for rank in range(RANKS))
    assert all(room.may_be_overwritten(rank, 0) for rank in range(RANKS))
    assert room.write() == ["survey", "part", "publish"]
    assert heard(first) == heard(second) == [(True, 4)] and heard(gone) == []
    assert all(room.may_be_overwritten(rank, 1) for rank in range(RANKS))
    [started] = room.journal.of("persist-started")
    assert started.why == "writing step 4 to the store: every 10 steps"
    assert room.checkpoints.stored_step == 4 and not room.checkpoints.pending


def test_where_nothing_is_held_and_where_all_is_stored_nothing_is_written(room: Room) -> None:
    box = FakeBox(1)
    room.checkpoints.ask(box, None, "why not")
    room.advance()
    assert heard(box) == [(False, None)] and not room.persister.asked
    room.seal(3)
    room.checkpoints.ask(box, None, "now there is one")
    room.advance()
    room.write()
    room.checkpoints.ask(box, 3, "once more")
    room.advance()
    assert heard(box)[1:] == [(True, 3)] * 2 and not room.persister.asked


@pytest.mark.parametrize("steps_follow", [False, True])
@pytest.mark.parametrize("is_skipped", [False, True])
def test_a_wanted_step_is_waited_for_unless_it_never_comes(
    room: Room, steps_follow: bool, is_skipped: bool
) -> None:
    box = FakeBox(1)
    room.seal(3)
    room.checkpoints.ask(box, 5, "the fifth", steps_follow=steps_follow)
    decided = 5 if is_skipped else 4
    room.advance(decided)
    if is_skipped and not steps_follow:
        assert room.write() == ["survey", "part", "publish"]
    else:
        room.time.pass_ns(WITHIN_NS)
        room.advance(decided)
        assert not room.persister.asked, "there is time left"
        room.time.pass_ns(1)
        room.advance(decided)
        assert room.write() == ["survey", "part", "publish"]
    assert heard(box) == [(False, 3)], "an older one is not what was asked for"


def test_a_step_that_comes_in_time_is_what_is_written(room: Room) -> None:
    box = FakeBox(1)
    room.checkpoints.ask(box, 5, "the fifth")
    room.seal(4)
    room.advance()
    room.seal(5)
    room.advance()
    assert room.persister.asked[0][0].step == 5
    room.write()
    assert heard(box) == [(True, 5)]


@pytest.mark.parametrize(
    ("timeline", "from_store", "stored"),
    [
        (Timeline(2, 3), False, None),
        (Timeline(2, 4), False, 4),
        (Timeline(2, 6), False, 4),
        (Timeline(2, 3), True, 3),
        (Timeline(1, 3), False, 4),
    ],
)
def test_what_was_stored_beyond_where_all_go_on_is_written_again(
    room: Room, timeline: Timeline, from_store: bool, stored: int | None
) -> None:
    room.checkpoints.goes_on(Timeline(1, 0), from_store=False)
    room.checkpoints.goes_on(Timeline(1, -1), from_store=True)
    assert room.checkpoints.stored_step is None, "that epoch was known"
    room.checkpoints.ask(None, None, "at the end")
    room.seal(4)
    room.advance()
    room.write()
    room.checkpoints.goes_on(timeline, from_store)
    assert room.checkpoints.stored_step == stored
    room.seal(5, epoch=2)
    room.checkpoints.ask(None, None, "again")
    room.advance()
    assert room.persister.asked[0][0].timeline == (timeline if timeline.epoch == 2 else (1, 0))


def test_what_is_under_way_hurries_once_somebody_waits_and_no_longer(room: Room) -> None:
    def is_urgent() -> bool:
        room.checkpoints.hurry()
        return room.persister.is_urgent

    room.seal(3)
    room.checkpoints.ask(FakeBox(1), 3, "every 3 steps", steps_follow=True)
    room.advance()
    assert not is_urgent() and room.persister.asked
    room.checkpoints.ask(None, None, "SIGTERM")
    assert is_urgent(), "it comes behind what is under way"
    room.write()
    room.seal(4)
    room.advance()
    assert is_urgent() and room.persister.asked
    room.write()
    assert not is_urgent()


def test_a_node_that_follows_hurries_as_its_leader_says(room: Room) -> None:
    of_two_nodes(room, 1)
    room.seal(4)
    for is_urgent in (True, False):
        room.checkpoints.carry_out("survey", room.stamps[0], 7, lambda *_: None, is_urgent)
        room.checkpoints.hurry()
        assert room.persister.is_urgent == is_urgent
    room.write()
    room.checkpoints.carry_out("part", room.stamps[0], 7, lambda *_: None, True)
    room.write()
    room.checkpoints.hurry()
    assert not room.persister.is_urgent


def of_two_nodes(room: Room, node: int) -> None:
    members = (Member(0, "a", 1, 1, 1), Member(1, "b", 1, 1, 1))
    room.checkpoints.join_mesh(Mesh(1, node, members, "secret"), lambda *order: None)


@pytest.mark.parametrize("number", [7, 8])
@pytest.mark.parametrize("act", ["part", "drop"])
def test_what_was_surveyed_for_another_node_is_dropped_unless_that_went_on(
    room: Room, act: str, number: int
) -> None:
    of_two_nodes(room, 1)
    room.seal(4)
    answers: list[tuple[bool, str, bool]] = []
    stamp = room.stamps[0]
    room.checkpoints.carry_out("survey", stamp, 7, lambda *answer: answers.append(answer))
    assert not room.may_be_overwritten(1) and room.may_be_overwritten(0), "its own rank's"
    room.answer(why="surveyed")
    assert answers == [(True, "surveyed", False)] and room.may_be_overwritten(1)
    room.checkpoints.carry_out(act, stamp, number, lambda *answer: None)  # type: ignore[arg-type]
    room.write()
    room.checkpoints.node_gone(0, "it is gone")
    dropped = [(act.act, act.attempt) for act, _ in room.persister.asked]
    assert dropped == ([] if number == 7 else [("drop", 7)])


def test_what_is_not_held_any_more_is_not_surveyed(room: Room) -> None:
    of_two_nodes(room, 1)
    room.seal(4)
    answers: list[tuple[bool, str, bool]] = []
    room.checkpoints.carry_out("survey", Stamp(3, 1), 7, lambda *answer: answers.append(answer))
    [(ok, why, hung)] = answers
    assert not ok and not hung and why.startswith("overwritten: ") and not room.persister.asked


def hang(room: Room, box: FakeBox) -> None:
    """One more attempt, over which the store hangs. What is left of it is dropped."""
    room.checkpoints.ask(box, None, "every step", steps_follow=True)
    room.advance()
    assert room.answer(ok=False, why="the persister stood still", hung=True).act == "survey"
    assert room.answer().act == "drop"


def test_a_store_that_hung_is_left_alone_for_ever_longer(room: Room) -> None:
    box = FakeBox(1)
    room.seal(3)
    for pause_s in (1, 2, 4, 8, 15, 15):
        hang(room, box)
        told = box.of(CheckpointDone)[-1].why
        assert told.endswith(f"the persister stood still; next try in {pause_s} s"), told
        assert room.journal.of("persist-failed")[-1].why.endswith(f"next try in {pause_s} s")
        room.time.pass_ns(pause_s * S_NS - 1)
        room.checkpoints.ask(box, None, "every step", steps_follow=True)
        room.advance()
        done = box.of(CheckpointDone)[-1]
        assert (done.ok, done.why) == (False, "the store hung, next try in 1 s")
        assert not room.persister.asked and not room.checkpoints.pending
        room.time.pass_ns(1)
    room.checkpoints.ask(box, None, "every step", steps_follow=True)
    room.advance()
    assert room.write() == ["survey", "part", "publish"]
    room.seal(4)
    hang(room, box)
    assert box.of(CheckpointDone)[-1].why.endswith("next try in 1 s"), "a success ends it"


def test_who_ends_waits_until_the_store_is_tried_again(room: Room) -> None:
    """The last step is in the store, or the job has not ended well: nothing of it is answered
    without a try."""
    box = FakeBox(1)
    room.seal(3)
    hang(room, box)
    last = FakeBox(2)
    room.checkpoints.ask(last, 3, "the end of the job")
    room.advance()
    assert heard(last) == [] and not room.persister.asked and room.checkpoints.pending
    room.time.pass_ns(1 * S_NS)
    room.advance(anybody=False)
    assert room.write() == ["survey", "part", "publish"] and heard(last) == [(True, 3)]


def test_an_attempt_that_fails_otherwise_is_tried_again_at_once(room: Room) -> None:
    box = FakeBox(1)
    room.seal(3)
    room.checkpoints.ask(box, None, "every step", steps_follow=True)
    room.advance()
    room.answer(ok=False, why="the persister died")
    room.answer()
    room.checkpoints.ask(box, None, "every step", steps_follow=True)
    room.advance()
    assert room.write() == ["survey", "part", "publish"]
