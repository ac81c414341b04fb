"""What may happen to the connections within a simulated machine, beyond
`tests/contracts/test_boxes.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.core.wire.conversations import KEEPER_WITH_NODE, RANK_WITH_KEEPER
from keepstep.model.messages.keeper_rank import (
    Goodbye,
    PageChanged,
    Released,
)
from keepstep.model.units import GIB, MS_NS, S_NS
from keepstep.ports import Box
from keepstep.sim.protocol.world.boxes import LocalSockets, SimBox
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import PortFault, World

PATH = Path("/memory/job/keeper.sock")
GONE = "gone"


class Ear:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def hear(self, box: Box, message: Any, /) -> None:
        self.heard.append(message)

    def gone(self, box: Box, /) -> None:
        self.heard.append(GONE)


class Node:
    """A machine on which a keeper listens."""

    def __init__(self, checks: bool = True, fault: PortFault | None = None) -> None:
        self.world = World(1, fault)
        machine = Machine(self.world, 0, None, GIB)
        self.keeper = machine.start("keeper")
        self.rank = machine.start("rank")
        self._sockets = LocalSockets(machine, checks)
        self.keeper_ear, self.rank_ear = Ear(), Ear()
        self.ends: list[Box] = []
        self.server = self._sockets.listen(
            self.keeper, PATH, KEEPER_WITH_NODE, self._accept, self._tell
        )

    def _accept(self, box: Box) -> Ear:
        self.ends.append(box)
        return self.keeper_ear

    @staticmethod
    def _tell(kind: str, why: str) -> None:
        raise AssertionError(why)

    def connect(self) -> SimBox:
        return self._sockets.connect(self.rank, PATH, RANK_WITH_KEEPER, self.rank_ear, self._tell)

    def run(self, for_ns: int = S_NS) -> None:
        self.world.run(self.world.now_ns + for_ns)


def test_messages_take_time_and_stay_in_their_order() -> None:
    node = Node()
    box = node.connect()
    for rank in range(100):
        box.send(PageChanged(rank))
    node.run(MS_NS // 100)
    assert node.keeper_ear.heard == []
    node.run()
    assert node.keeper_ear.heard == [PageChanged(rank) for rank in range(100)]


def test_nobody_listens_where_the_server_has_died_or_closed() -> None:
    node = Node()
    node.keeper.end("killed")
    with pytest.raises(OSError):
        node.connect()
    node = Node()
    node.server.close()
    with pytest.raises(OSError):
        node.connect()


def test_a_server_that_dies_before_it_takes_a_connection_ends_it() -> None:
    node = Node()
    box = node.connect()
    box.send(PageChanged(1))
    node.keeper.end("killed")
    assert not box.send(PageChanged(2))
    node.run()
    assert node.rank_ear.heard == [GONE]
    assert node.ends == []


def test_what_a_process_sent_is_heard_after_its_end() -> None:
    node = Node()
    box = node.connect()
    box.send(Goodbye(1, True, "done"))
    node.rank.end("killed")
    node.run()
    assert node.keeper_ear.heard == [Goodbye(1, True, "done"), GONE]
    assert node.rank_ear.heard == []


def test_a_process_may_be_killed_at_each_message() -> None:
    node = Node()
    box = node.connect()
    node.rank.dies_at_call = 2

    def talk() -> None:
        for rank in range(5):
            box.send(PageChanged(rank))

    node.world.carry_out(node.rank, talk)
    node.run()
    assert not node.rank.alive
    assert node.keeper_ear.heard == [PageChanged(0), GONE]


def test_a_message_that_fails_ends_the_connection_at_both_ends() -> None:
    node = Node(fault=PortFault("rank", 3, is_deadly=False))
    box = node.connect()
    node.run()
    assert box.send(PageChanged(1))
    assert not box.send(PageChanged(2))
    node.run()
    assert node.rank_ear.heard == [GONE]
    assert node.keeper_ear.heard[-1] == GONE
    assert PageChanged(2) not in node.keeper_ear.heard
    assert not node.ends[0].send(Released())
    assert not box.send(PageChanged(3))


def test_some_pokes_get_lost() -> None:
    node = Node()
    box = node.connect()
    for rank in range(2000):
        box.poke(PageChanged(rank))
    node.run()
    heard = [message.rank for message in node.keeper_ear.heard]
    assert 1900 < len(heard) < 2000
    assert heard == sorted(set(heard))


def test_without_checks_messages_cross_as_they_are() -> None:
    node = Node(checks=False)
    message = PageChanged(1)
    node.connect().send(message)
    node.run()
    assert node.keeper_ear.heard[0] is message


def test_a_closed_connection_is_forgotten_by_its_process() -> None:
    node = Node()
    before = len(node.rank.on_end), len(node.keeper.on_end)
    for _ in range(10):
        node.connect().close()
    node.run()
    assert (len(node.rank.on_end), len(node.keeper.on_end)) == before
