"""What every `Persisters` does, as its client sees it: each act is answered, in order, also when
the persister died over it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Protocol

import pytest

from keepstep.config import resolve
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.persisters import ChildPersisters, persister_command
from keepstep.model.messages.persister import ActDone, ActName, CheckpointAct
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Box, Hearer
from keepstep.runtime.keeper.persister_client import PersisterClient
from keepstep.runtime.persister.conversation import KEEPER_WITH_PERSISTER
from keepstep.sim.protocol.job.persisters import SimPersisters
from keepstep.sim.protocol.world.boxes import LocalSockets
from keepstep.sim.protocol.world.filesystem import SharedDisk
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import World

PATIENCE_S = 60.0


class Desk(Protocol):
    """A client, and the loop it answers in."""

    client: PersisterClient

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
        self._loop = Loop()
        command = persister_command(resolve(config, {}, "j"))
        self.told: list[tuple[str, str]] = []
        self.client = PersisterClient(
            ChildPersisters(
                self._loop,
                command,
                KEEPER_WITH_PERSISTER,
                lambda kind, why: self.told.append((kind, why)),
            )
        )

    def kill(self) -> None:
        assert self.client.pid is not None
        os.kill(self.client.pid, signal.SIGKILL)

    def until(self, holds: Callable[[], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        timer = self._loop.after(int(PATIENCE_S * S_NS), lambda: None)
        self._loop.run(lambda: holds() or time.monotonic() > until_s)
        timer.cancel()
        assert holds(), "it does not come about"

    def close(self) -> None:
        self.client.close()
        self._loop.close()


class SimDesk:
    def __init__(self, room: Path) -> None:
        config = {"job": "j", "store": "simulated://s", "arena_dir": "/m", "state_dir": "/state"}
        self._world = World(1)
        self._machine = Machine(self._world, 0, None, 1 << 20)
        self.client = PersisterClient(
            SimPersisters(
                sockets=LocalSockets(self._machine),
                keeper=self._machine.start("keeper"),
                settings=resolve(config, {"HOME": "/nowhere"}, "j"),
                disk=SharedDisk(Random(1)),
                start_ns=lambda: S_NS,
                act_ns=S_NS,
                tell=lambda kind, why: None,
            )
        )

    def kill(self) -> None:
        assert self.client.pid is not None
        self._machine.processes[self.client.pid].end("killed")

    def until(self, holds: Callable[[], bool]) -> None:
        until_ns = self._world.now_ns + int(PATIENCE_S * S_NS)
        while not holds() and self._world.now_ns < until_ns:
            self._world.run(self._world.now_ns + MS_NS)
        assert holds(), "it does not come about"

    def close(self) -> None:
        self.client.close()


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
        desk.client.ask(request(act), lambda answer, number=number: heard.append((number, answer)))  # type: ignore[misc]
    assert heard == [], "not while it is asked"
    desk.until(lambda: len(heard) == 5)
    assert [number for number, _ in heard] == list(range(5))
    assert [answer.ok for _, answer in heard] == [True, False, True, False, False]
    assert all(isinstance(answer.why, str) and answer.there is False for _, answer in heard)


def test_who_waited_when_it_died_is_told_and_the_next_request_is_answered(desk: Desk) -> None:
    heard: list[ActDone] = []
    desk.client.ask(request("drop"), heard.append)
    desk.client.ask(request("drop"), heard.append)
    desk.kill()
    desk.until(lambda: len(heard) == 2)
    assert [(a.ok, a.there, "died" in a.why) for a in heard] == [(False, False, True)] * 2
    desk.client.ask(request("drop"), heard.append)
    desk.until(lambda: len(heard) == 3)
    assert heard[2].ok is True


def test_who_hears_may_ask_again(desk: Desk) -> None:
    heard: list[str] = []

    def again(answer: ActDone) -> None:
        heard.append("first")
        desk.client.ask(request("drop"), lambda answer: heard.append("second"))

    desk.client.ask(request("drop"), again)
    desk.kill()
    desk.until(lambda: len(heard) == 2)
    assert heard == ["first", "second"]


def test_a_closed_connection_ends_it(desk: Desk) -> None:
    desk.client.start()
    pid = desk.client.pid
    desk.client.close()
    assert pid is not None and desk.client.pid is None


class FewProcesses:
    """A machine that gives no more of them for a while."""

    def __init__(self, desk: SimDesk) -> None:
        self._some = desk.client._persisters
        self.gives_some = False

    def start(self, hearer: Hearer) -> Box:
        if not self.gives_some:
            raise BlockingIOError("no more processes")
        return self._some.start(hearer)


def test_where_none_can_be_started_acts_are_answered_so_until_one_can(tmp_path: Path) -> None:
    desk = SimDesk(tmp_path)
    few = desk.client._persisters = FewProcesses(desk)
    heard: list[ActDone] = []
    desk.client.start()
    desk.client.ask(request("drop"), heard.append)
    assert [answer.ok for answer in heard] == [False]
    few.gives_some = True
    desk.client.ask(request("drop"), heard.append)
    few.gives_some = False
    desk.kill()
    desk.client.ask(request("drop"), heard.append)
    assert [answer.ok for answer in heard] == [False] * 3, "the dead one, and none in its place"
    few.gives_some = True
    desk.client.ask(request("drop"), heard.append)
    desk.until(lambda: len(heard) == 4)
    assert heard[-1].ok
