"""The client of a persister: whoever waits is answered once, whatever becomes of the persister."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.model.messages.keeper_rank import NotUnderstood
from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.ports import ChildConnection, Hearer
from keepstep.runtime.keeper.persister_client import PersisterClient

ACT = CheckpointAct("drop", 0, 3, 1, 5, (1,))
WELL = ActDone(True, "well")


class FakeBox:
    """A persister, as the keeper sees it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.asked: list[Any] = []
        self.is_dead = False
        self.computed_ns = 0
        self.is_open = True
        self.placed: list[bool] = []
        self.is_refused = False

    def hurry(self, is_urgent: bool, /) -> bool:
        self.placed.append(is_urgent)
        return not self.is_refused

    def send(self, message: Any, /) -> bool:
        if self.is_dead:
            return False
        self.asked.append(message)
        return True

    def poke(self, message: Any, /) -> None: ...

    def hear_rest(self) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None:
        self.is_open = False


class FakePersisters:
    def __init__(self) -> None:
        self.started: list[FakeBox] = []

    def start(self, hearer: Hearer) -> ChildConnection:
        self.started.append(FakeBox(100 + len(self.started)))
        return self.started[-1]


@pytest.fixture
def persisters() -> FakePersisters:
    return FakePersisters()


def test_one_is_started_when_it_is_needed_and_kept(persisters: FakePersisters) -> None:
    client = PersisterClient(persisters)
    heard: list[ActDone] = []
    assert client.pid is None
    for _ in range(3):
        client.ask(ACT, heard.append)
    [box] = persisters.started
    assert client.pid == box.pid and box.asked == [ACT] * 3 and heard == []
    for _ in range(3):
        client.hear(box, WELL)
    assert heard == [WELL] * 3


def test_the_next_act_after_its_death_asks_another_one(persisters: FakePersisters) -> None:
    client = PersisterClient(persisters)
    heard: list[ActDone] = []
    client.ask(ACT, heard.append)
    first = persisters.started[0]
    client.gone(first)
    assert [done.ok for done in heard] == [False] and client.pid is None and not first.is_open
    client.ask(ACT, heard.append)
    second = persisters.started[1]
    client.hear(first, WELL)
    client.gone(first)
    assert len(heard) == 1, "the dead one says nothing any more"
    client.hear(second, WELL)
    assert heard[1] == WELL


def test_a_death_that_was_not_heard_yet_costs_no_act(persisters: FakePersisters) -> None:
    client = PersisterClient(persisters)
    heard: list[tuple[str, bool]] = []
    client.ask(ACT, lambda done: heard.append(("first", done.ok)))
    persisters.started[0].is_dead = True
    client.ask(ACT, lambda done: heard.append(("second", done.ok)))
    assert heard == [("first", False)] and persisters.started[1].asked == [ACT]
    client.hear(persisters.started[1], WELL)
    assert heard == [("first", False), ("second", True)]


def test_who_is_told_of_a_death_may_ask_again(persisters: FakePersisters) -> None:
    client = PersisterClient(persisters)
    heard: list[str] = []

    def again(done: ActDone) -> None:
        heard.append("first")
        client.ask(ACT, lambda done: heard.append(done.why))

    client.ask(ACT, again)
    client.gone(persisters.started[0])
    assert heard == ["first"] and len(persisters.started) == 2
    client.hear(persisters.started[1], WELL)
    assert heard == ["first", "well"]


def test_one_that_does_not_understand_is_ended(persisters: FakePersisters) -> None:
    client = PersisterClient(persisters)
    heard: list[ActDone] = []
    client.ask(ACT, heard.append)
    client.hear(persisters.started[0], NotUnderstood("another release"))
    assert not persisters.started[0].is_open and "another release" in heard[0].why


def test_closed_it_answers_nothing(persisters: FakePersisters) -> None:
    client = PersisterClient(persisters)
    heard: list[ActDone] = []
    client.ask(ACT, heard.append)
    client.close()
    client.hear(persisters.started[0], WELL)
    client.gone(persisters.started[0])
    assert heard == [] and not persisters.started[0].is_open


def test_it_gives_way_until_somebody_waits_and_is_told_so_until_it_could_be(
    persisters: FakePersisters,
) -> None:
    client = PersisterClient(persisters)
    client.hurry(True)  # there is none
    client.start()
    [box] = persisters.started
    client.ask(ACT, lambda done: None)
    client.hurry(False)
    assert box.placed == [], "it gets ready"
    client.hear(box, WELL)
    for _ in range(2):
        client.hurry(False)
    assert box.placed == [False]
    box.is_refused = True
    client.hurry(True)
    box.is_refused = False
    for _ in range(2):
        client.hurry(True)
    assert box.placed == [False, True, True]
    client.gone(box)
    client.ask(ACT, lambda done: None)
    client.hurry(True)
    assert persisters.started[-1].placed == [True]
