"""What every `Writer` does: each request is answered, in order, also when it died over it."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from keepstep.config import resolve
from keepstep.model.messages.persister import ActDone, ActName, CheckpointAct
from keepstep.ports import Writer
from keepstep.runtime.keeper.persister_client import PersisterClient, persister_command
from tests.contracts.simulated import SimDesk

PATIENCE_S = 60.0


class Desk(Protocol):
    """A writer, and the loop it answers in."""

    writer: Writer

    def kill(self) -> None:
        """In the middle of whatever it does."""

    def until(self, holds: Callable[[], bool]) -> None:
        """Let the loop run until that is so."""

    def close(self) -> None: ...


class ChildsDesk:
    def __init__(self, room: Path) -> None:
        config = {
            "job": "j",
            "store": str(room / "store"),
            "arena_dir": room / "arena",
            "state_dir": room / "state",
        }
        self._selector = selectors.DefaultSelector()
        self._child = PersisterClient(persister_command(resolve(config, {}, "j")), self._selector)
        self.writer: Writer = self._child

    def kill(self) -> None:
        assert self._child.pid is not None
        os.kill(self._child.pid, signal.SIGKILL)

    def until(self, holds: Callable[[], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until_s, "it does not come about"
            for key, _ in self._selector.select(1.0):
                key.data()

    def close(self) -> None:
        self.writer.close()
        self._selector.close()


DESKS: dict[str, Callable[[Path], Desk]] = {"child": ChildsDesk, "simulated": SimDesk}


@pytest.fixture(params=DESKS)
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    made = DESKS[request.param](tmp_path)
    yield made
    made.close()


def request(act: ActName) -> CheckpointAct:
    return CheckpointAct(act, 0, 3, 1, 5, (1,))


def test_every_request_is_answered_in_order(desk: Desk) -> None:
    heard: list[tuple[int, ActDone]] = []
    # nobody holds anything: there is nothing to survey
    acts: tuple[ActName, ...] = ("drop", "part", "drop", "publish", "survey")
    for number, act in enumerate(acts):
        desk.writer.ask(request(act), lambda answer, number=number: heard.append((number, answer)))  # type: ignore[misc]
    assert heard == [], "not while it is asked"
    desk.until(lambda: len(heard) == 5)
    assert [number for number, _ in heard] == list(range(5))
    assert [answer.ok for _, answer in heard] == [True, False, True, False, False]
    assert all(isinstance(answer.why, str) and answer.there is False for _, answer in heard)


def test_who_waited_when_it_died_is_told_and_the_next_request_is_answered(desk: Desk) -> None:
    heard: list[ActDone] = []
    desk.writer.ask(request("drop"), heard.append)
    desk.writer.ask(request("drop"), heard.append)
    desk.kill()
    desk.until(lambda: len(heard) == 2)
    assert [(a.ok, a.there, "died" in a.why) for a in heard] == [(False, False, True)] * 2
    desk.writer.ask(request("drop"), heard.append)
    desk.until(lambda: len(heard) == 3)
    assert heard[2].ok is True


def test_who_hears_may_ask_again(desk: Desk) -> None:
    heard: list[str] = []

    def again(answer: ActDone) -> None:
        heard.append("first")
        desk.writer.ask(request("drop"), lambda answer: heard.append("second"))

    desk.writer.ask(request("drop"), again)
    desk.kill()
    desk.until(lambda: len(heard) == 2)
    assert heard == ["first", "second"]
