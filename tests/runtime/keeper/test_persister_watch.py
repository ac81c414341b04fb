"""Persister watch: one that stands still is told of, then given up; one that computes never is."""

from __future__ import annotations

import pytest

from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import ChildConnection, Hearer
from keepstep.runtime.keeper.persister_client import PersisterClient
from keepstep.runtime.keeper.persister_watch import GIVEN_UP_NS, TOLD_NS, PersisterWatch
from tests.runtime.fakes import FakeBox, FakeJournal, FakeTime

ACT = CheckpointAct("part", 0, 3, 1, 5, (1,))


class ComputingBox(FakeBox):
    """See `ports.ChildConnection`."""

    computed_ns = 0


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
    room.look(GIVEN_UP_NS - TOLD_NS)
    assert room.journal.kinds == ["persister-stuck"] and room.heard == [] and box.is_open
    room.look(2 * S_NS)
    assert room.journal.kinds == ["persister-stuck"] * 2 and not box.is_open
    assert [done.ok for done in room.heard] == [False]
    assert room.ask() is not box, "the next act has another one"


def test_one_that_computes_is_never_given_up(room: Room) -> None:
    room.ask()
    room.look(10 * GIVEN_UP_NS, computes_ns=MS_NS)
    assert room.journal.events == [] and room.heard == []


def test_one_that_nobody_waits_for_may_stand_still(room: Room) -> None:
    box = room.ask()
    room.client.hear(box, ActDone(True, "well"))
    room.look(10 * GIVEN_UP_NS)
    room.ask()
    room.look(TOLD_NS)
    assert room.journal.events == [] and box.is_open


def test_another_one_begins_anew(room: Room) -> None:
    first = room.ask()
    room.look(GIVEN_UP_NS - S_NS)
    room.client.gone(first)
    room.ask()
    room.look(TOLD_NS)
    assert room.journal.kinds == ["persister-stuck"] and len(room.heard) == 1
