"""Checkpoints that a training does not wait for: who is asked, and what a person is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.config import Config, resolve
from keepstep.model.events import ERROR
from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.runtime.rank.keeper_client import Answered
from keepstep.runtime.rank.periodic_checkpoints import PeriodicCheckpoints
from keepstep.runtime.rank.world import RankOptions
from tests.runtime.fakes import FakeJournal

EVERY = 4


class Room:
    def __init__(self, keep: str = "latest:2", has_store: bool = True, asks: bool = True) -> None:
        settings = resolve(Config(keep=keep, persist_every_steps=EVERY), {}, default_job="j")
        options = replace(RankOptions.of(settings), has_store=has_store)
        self.journal = FakeJournal()
        self.asked: dict[int, Answered] = {}
        self.checkpoints = PeriodicCheckpoints(options, self.journal, asks, self._persist)

    def _persist(self, step: int, why: str, answered: Answered, steps_follow: bool) -> None:
        assert steps_follow
        self.asked[step] = answered

    def train(self, first: int, last: int, loss: object = None) -> None:
        for step in range(first, last + 1):
            self.checkpoints.completed(step, loss)

    def answer(self, step: int, why: str = "") -> None:
        """`why` it has failed; empty: it has not."""
        self.asked.pop(step)(CheckpointDone(0, not why, step, why))

    def told(self, kind: str) -> int:
        return len(self.journal.of(kind))


@pytest.mark.parametrize(
    ("has_store", "asks", "expected"), [(True, True, [3, 7]), (False, True, []), (True, False, [])]
)
def test_every_so_many_steps_one_rank_asks(
    has_store: bool, asks: bool, expected: list[int]
) -> None:
    room = Room(has_store=has_store, asks=asks)
    room.train(0, 9)
    assert list(room.asked) == expected


def test_one_that_is_late_is_told_once() -> None:
    room = Room()
    room.train(0, 3)
    room.answer(3)
    room.train(4, 8)
    assert room.told("persist-late") == 0 and "step 3" in room.checkpoints.words()
    room.train(9, 20)
    assert room.told("persist-late") == 1


def test_what_is_on_its_way_at_the_end_is_said() -> None:
    room = Room()
    room.train(0, 3)
    assert room.checkpoints.words() == "nothing stored, that of step 3 was still being written"
    room.answer(3)
    assert room.checkpoints.words() == "the newest checkpoint is of step 3"


def test_what_fails_for_the_same_reason_again_and_again_is_told_ever_more_rarely() -> None:
    room = Room()
    told = []
    for count in range(1, 102):
        step = count * EVERY - 1
        room.train(step, step)
        room.answer(step, why=f"writing step-{step}: no space left")
        if room.journal.levels[-1] == ERROR:
            told.append(count)
    assert told == [1, 10, 100] and room.told("not-stored") == 101
    assert "101 checkpoints failed" in room.checkpoints.words()


@pytest.mark.parametrize("between", ["stored", "another reason"])
def test_what_fails_anew_is_told_anew(between: str) -> None:
    room = Room()
    room.train(0, 11)
    room.answer(3, why="no space left")
    room.answer(7, why="" if between == "stored" else between)
    room.answer(11, why="no space left")
    assert room.journal.levels.count(ERROR) == (2 if between == "stored" else 3)


@pytest.mark.parametrize(
    ("keep", "loss", "expected"),
    [("best:loss:min:1", None, 1), ("best:loss:min:1", 0.5, 0), ("latest:2", None, 0)],
)
def test_a_rule_without_what_it_goes_by_is_told_once(
    keep: str, loss: object, expected: int
) -> None:
    room = Room(keep=keep)
    room.train(0, 7, loss)
    assert room.told("no-loss") == 0
    room.answer(3)
    room.answer(7)
    room.checkpoints.stored(9)
    assert room.told("no-loss") == expected
