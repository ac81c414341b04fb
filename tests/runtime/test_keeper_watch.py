"""Keeper watch: who hangs while it is waited for is told of and ended; who answers never is, nor is
anybody for time in which the watch itself stood still."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.messages.keeper_rank import AreYouThere
from keepstep.model.units import S_NS
from keepstep.ports import Box
from keepstep.runtime.keeper_watch import (
    ASKED_AFTER_LOOKS,
    GIVEN_UP_AFTER_LOOKS,
    LOOK_NS,
    KeeperWatch,
)
from tests.runtime.fakes import FakeBox, FakeJournal, FakeKeepers, FakeTime

GIVEN_UP_NS = GIVEN_UP_AFTER_LOOKS * LOOK_NS


class Waiting:
    """Somebody who waits for a keeper."""

    def __init__(self) -> None:
        self.time = FakeTime()
        self.journal = FakeJournal()
        self.keepers = FakeKeepers()
        self.keepers.find(self, lambda box: None, lambda error: None)
        self.box: Box | None = self.keepers.box
        self.watch = KeeperWatch(self.time, self.journal, self.keepers, lambda: self.box)
        self.watch.begin()

    def gone(self, box: FakeBox) -> None:
        self.box = None

    @property
    def questions(self) -> int:
        return len(self.keepers.box.of(AreYouThere))


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def test_who_hangs_is_told_of_once_and_ended(waiting: Waiting) -> None:
    keeper = waiting.keepers.box
    waiting.time.pass_ns(GIVEN_UP_NS - 1)
    assert not waiting.keepers.ended and waiting.questions and waiting.watch.is_silent
    waiting.time.pass_ns(1)
    assert waiting.keepers.ended == [keeper]
    [told] = waiting.journal.of("keeper-stuck")
    assert f"has not answered for {GIVEN_UP_NS // S_NS} s" in told.why
    waiting.time.pass_ns(10 * GIVEN_UP_NS)
    assert waiting.keepers.ended == [keeper] and waiting.journal.kinds == ["keeper-stuck"]
    assert not waiting.watch.is_silent


@given(st.lists(st.integers(1, GIVEN_UP_AFTER_LOOKS - 1), max_size=20))
def test_who_gives_signs_of_life_is_never_ended(looks: list[int]) -> None:
    waiting = Waiting()
    for count in looks:
        waiting.time.pass_ns(count * LOOK_NS)
        waiting.watch.heard()
    assert not waiting.keepers.ended
    assert waiting.questions == sum(count // ASKED_AFTER_LOOKS for count in looks)


@given(
    st.lists(st.integers(0, 3600 * S_NS), min_size=1, max_size=GIVEN_UP_AFTER_LOOKS - 1),
)
def test_time_in_which_nobody_looked_counts_for_one_look(pauses: list[int]) -> None:
    """As when the process was stopped, with its keeper or alone."""
    waiting = Waiting()
    for pause_ns in pauses:
        waiting.time.now_ns += pause_ns
        waiting.time.pass_ns()
    assert not waiting.keepers.ended


def test_nobody_is_asked_or_ended_who_is_not_waited_for(waiting: Waiting) -> None:
    keeper, waiting.box = waiting.box, None
    waiting.time.pass_ns(10 * GIVEN_UP_NS)
    waiting.box = keeper
    waiting.time.pass_ns(10 * GIVEN_UP_NS)
    assert not waiting.keepers.ended and not waiting.questions


def test_the_next_keeper_has_its_own_time(waiting: Waiting) -> None:
    waiting.time.pass_ns(GIVEN_UP_NS - LOOK_NS)
    waiting.keepers.find(waiting, lambda box: None, lambda error: None)
    waiting.box = waiting.keepers.box
    waiting.time.pass_ns(GIVEN_UP_NS - LOOK_NS)
    assert not waiting.keepers.ended
    waiting.time.pass_ns(LOOK_NS)
    assert waiting.keepers.ended == [waiting.keepers.box]


def test_a_new_question_begins_anew(waiting: Waiting) -> None:
    waiting.time.pass_ns(GIVEN_UP_NS - LOOK_NS)
    keeper, waiting.box = waiting.box, None
    waiting.time.pass_ns(LOOK_NS)
    waiting.box = keeper
    waiting.watch.begin()
    waiting.time.pass_ns(GIVEN_UP_NS - LOOK_NS)
    assert not waiting.keepers.ended


def test_one_that_does_not_die_is_ended_again(waiting: Waiting) -> None:
    """As a process that hangs in the kernel."""
    keeper = waiting.keepers.box
    keeper.hearer = type("Deaf", (), {"gone": lambda self, box: None})()
    waiting.time.pass_ns(2 * GIVEN_UP_NS)
    assert waiting.keepers.ended == [keeper, keeper]
