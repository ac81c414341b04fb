"""A simulated persister is a process of its own: it hears what was said before it began, and ends
with its connection."""

from __future__ import annotations

from random import Random

import pytest

from keepstep.config import resolve
from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Box
from keepstep.sim.protocol.job.persisters import SimPersisters
from keepstep.sim.protocol.world.boxes import LocalSockets, SimBox
from keepstep.sim.protocol.world.filesystem import SharedDisk
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import Process, World

DROP = CheckpointAct("drop", 0, 3, 1, 5, (1,))
SURVEY = CheckpointAct("survey", 0, 3, 1, 5, (1,))
START_NS = 100 * MS_NS


class Keeper:
    """A keeper's process, which writes down what it hears."""

    def __init__(self) -> None:
        self.world = World(1)
        self.machine = Machine(self.world, 0, None, 1 << 20)
        self.process = self.machine.start("keeper")
        self.heard: list[ActDone | str] = []
        self.told: list[str] = []
        config = {"job": "j", "store": "simulated://s", "arena_dir": "/m", "state_dir": "/state"}
        self.persisters = SimPersisters(
            sockets=LocalSockets(self.machine),
            keeper=self.process,
            settings=resolve(config, {"HOME": "/nowhere"}, "j"),
            disk=SharedDisk(Random(1)),
            start_ns=lambda: START_NS,
            act_ns=10 * MS_NS,
            tell=lambda kind, why: self.told.append(kind),
        )
        self.box = self.persisters.start(self)

    @property
    def child(self) -> Process | None:
        return self.machine.processes.get(self.box.pid)

    def hear(self, box: Box, message: ActDone, /) -> None:
        self.heard.append(message)

    def gone(self, box: Box, /) -> None:
        self.heard.append("gone")

    def let_pass(self, duration_ns: int) -> None:
        self.world.run(self.world.now_ns + duration_ns)


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


def test_what_is_said_before_it_began_is_answered_in_order(keeper: Keeper) -> None:
    assert keeper.box.send(DROP) and keeper.box.send(SURVEY)
    keeper.let_pass(START_NS - MS_NS)
    assert keeper.heard == []
    keeper.let_pass(S_NS)
    answers = [answer for answer in keeper.heard if isinstance(answer, ActDone)]
    assert [answer.ok for answer in answers] == [True, False]
    assert keeper.child is not None and keeper.child.parent_pid == keeper.process.pid


def test_closing_the_connection_ends_it_at_once_and_tells_nothing(keeper: Keeper) -> None:
    keeper.let_pass(S_NS)
    keeper.box.close()
    assert keeper.child is None and not keeper.box.send(DROP)
    keeper.let_pass(S_NS)
    assert keeper.heard == [] and keeper.told == []


@pytest.mark.parametrize("age_ns", [0, START_NS + S_NS], ids=["young", "begun"])
def test_one_that_dies_is_told_once(keeper: Keeper, age_ns: int) -> None:
    keeper.let_pass(age_ns)
    assert keeper.child is not None
    keeper.child.end("killed")
    assert not keeper.box.send(DROP)
    keeper.let_pass(S_NS)
    assert keeper.heard == ["gone"] and keeper.told == ["persister-ended"]


def test_when_its_keeper_dies_it_ends_behind_the_act_under_way(keeper: Keeper) -> None:
    keeper.let_pass(S_NS)
    keeper.box.send(SURVEY)
    keeper.box.send(SURVEY)
    keeper.let_pass(MS_NS)
    child = keeper.child
    assert child is not None
    keeper.process.end("killed")
    keeper.let_pass(MS_NS // 2)
    assert child.alive
    keeper.let_pass(S_NS)
    assert not child.alive


def test_one_that_says_what_is_no_message_is_ended(keeper: Keeper) -> None:
    keeper.let_pass(S_NS)
    assert isinstance(keeper.box, SimBox)
    keeper.box.other.send_packet(b"nonsense")
    keeper.let_pass(S_NS)
    assert keeper.child is None
    assert keeper.told == ["message-refused", "persister-ended"] and keeper.heard == ["gone"]


def test_a_machine_may_give_no_more_processes(keeper: Keeper) -> None:
    keeper.process.touch = lambda *what: True  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no more processes"):
        keeper.persisters.start(keeper)
