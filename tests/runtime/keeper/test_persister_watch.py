"""Persister watch: one that stands still is told of, then given up; one that computes is given
longer; how long is learnt from what has succeeded."""

from __future__ import annotations

import pytest

from keepstep.core.resume.patience import (
    FIRST_STANDSTILL_NS,
    FIRST_WRITE_NS,
    LEAST_STANDSTILL_NS,
    LEAST_WRITE_NS,
    MOST_STANDSTILL_NS,
    STANDSTILLS,
    WRITES,
)
from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import ChildConnection, Hearer
from keepstep.runtime.keeper.persister_client import PersisterClient
from keepstep.runtime.keeper.persister_watch import TOLD_NS, PersisterWatch
from tests.runtime.fakes import FakeBox, FakeJournal, FakeTime

ACT = CheckpointAct("part", 0, 3, 1, 5, (1,))
SURVEY = CheckpointAct("survey", 0, 3, 1, 5, (1,))


class ComputingBox(FakeBox):
    """See `ports.ChildConnection`."""

    computed_ns = 0

    def hurry(self, is_urgent: bool, /) -> bool:
        return True


class Room:
    """A persister that is asked and looked at once a second."""

    def __init__(self) -> None:
        self.boxes: list[ComputingBox] = []
        self.heard: list[ActDone] = []
        self.journal, self.time = FakeJournal(), FakeTime()
        self.client = PersisterClient(self)
        self.watch = PersisterWatch(self.client, self.time, self.journal)

    def start(self, hearer: Hearer) -> ChildConnection:
        self.boxes.append(ComputingBox(100 + len(self.boxes)))
        return self.boxes[-1]

    def ask(self) -> ComputingBox:
        self.client.ask(ACT, self.heard.append)
        return self.boxes[-1]

    def look(self, for_ns: int, computes_ns: int = 0) -> None:
        for _ in range(for_ns // S_NS):
            self.boxes[-1].computed_ns += computes_ns
            self.watch.look()
            self.time.pass_ns(S_NS)


@pytest.fixture
def room() -> Room:
    return Room()


def test_one_that_stands_still_is_told_once_and_then_given_up(room: Room) -> None:
    box = room.ask()
    room.look(TOLD_NS)
    assert room.journal.events == []
    room.look(FIRST_STANDSTILL_NS - TOLD_NS)
    assert room.journal.kinds == ["persister-stuck"] and room.heard == [] and box.is_open
    room.look(2 * S_NS)
    assert room.journal.kinds == ["persister-stuck"] * 2 and not box.is_open
    assert [(done.ok, done.hung) for done in room.heard] == [(False, True)]
    assert room.ask() is not box, "the next act has another one"


def test_one_that_computes_is_given_longer(room: Room) -> None:
    box = room.ask()
    room.look(FIRST_WRITE_NS, computes_ns=MS_NS)
    assert room.journal.events == [] and room.heard == [] and box.is_open
    room.look(2 * S_NS, computes_ns=MS_NS)
    assert room.journal.kinds == ["persister-stuck"] and not box.is_open
    assert "too slow" in room.heard[0].why and room.heard[0].hung


@pytest.mark.parametrize("stood_s", [0, 20, 119])
def test_it_may_stand_still_as_long_as_it_has_before(room: Room, stood_s: int) -> None:
    """Ten times as long, within bounds: a store that has answered within seconds so far and does
    not now hangs, and one that often takes its time does not."""
    box = room.ask()
    room.look((stood_s + 1) * S_NS)
    room.look(3 * S_NS, computes_ns=10 * MS_NS)
    room.client.hear(box, ActDone(True, "well"))
    room.look(5 * S_NS)
    room.ask()
    learnt_ns = STANDSTILLS * stood_s * S_NS
    most_ns = min(max(learnt_ns, LEAST_STANDSTILL_NS), MOST_STANDSTILL_NS)
    room.look(most_ns - 30 * S_NS)
    assert box.is_open
    room.look(60 * S_NS)
    assert not box.is_open


def test_how_long_it_stood_before_its_answer_counts_as_well(room: Room) -> None:
    """It need not be seen to compute once more."""
    box = room.ask()
    room.look(40 * S_NS)
    room.client.hear(box, ActDone(True, "well"))
    room.look(5 * S_NS)
    room.ask()
    room.look(STANDSTILLS * 40 * S_NS - S_NS)
    assert box.is_open
    room.look(3 * S_NS)
    assert not box.is_open


def test_what_has_failed_teaches_nothing(room: Room) -> None:
    box = room.ask()
    room.look(100 * S_NS)
    room.client.hear(box, ActDone(False, "no"))
    room.look(5 * S_NS)
    room.ask()
    room.look(FIRST_STANDSTILL_NS)
    assert box.is_open
    room.look(2 * S_NS)
    assert not box.is_open


@pytest.mark.parametrize("took_s", [5, 600])
def test_it_may_take_as_long_as_it_has_before_however_busy_it_is(room: Room, took_s: int) -> None:
    """Eight times as long, at least ten minutes, for the same act: a survey is quick."""
    room.client.ask(SURVEY, room.heard.append)
    box = room.boxes[-1]
    room.look(3 * S_NS, computes_ns=10 * MS_NS)
    room.client.hear(box, ActDone(True, "well"))
    room.look(S_NS)
    room.ask()
    room.look(took_s * S_NS, computes_ns=10 * MS_NS)
    room.client.hear(box, ActDone(True, "well"))
    room.look(S_NS)
    room.ask()
    most_ns = max(WRITES * took_s * S_NS, LEAST_WRITE_NS)
    room.look(most_ns - 10 * S_NS, computes_ns=10 * MS_NS)
    assert box.is_open
    room.look(WRITES * 3 * S_NS, computes_ns=10 * MS_NS)
    assert not box.is_open and "at most and is given up" in room.heard[-1].why


def test_one_that_nobody_waits_for_may_stand_still(room: Room) -> None:
    box = room.ask()
    room.client.hear(box, ActDone(True, "well"))
    room.look(10 * FIRST_STANDSTILL_NS)
    room.ask()
    room.look(TOLD_NS)
    assert room.journal.events == [] and box.is_open


def test_another_one_begins_anew(room: Room) -> None:
    first = room.ask()
    room.look(FIRST_STANDSTILL_NS - S_NS)
    room.client.gone(first)
    room.ask()
    room.look(TOLD_NS)
    assert room.journal.kinds == ["persister-stuck"] and len(room.heard) == 1
