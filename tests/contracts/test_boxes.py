"""What every `Box` does: messages come whole and in order, the end comes once and last, and what is
no message ends nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from keepstep.core.wire.codec import NotAMessage
from keepstep.core.wire.conversations import KEEPER_WITH_NODE, RANK_WITH_KEEPER
from keepstep.edge.net.boxes import SocketBox, connect, listen
from keepstep.edge.os.loop import Loop
from keepstep.model.messages.keeper_rank import (
    CountTraffic,
    Goodbye,
    NotUnderstood,
    PageChanged,
    Released,
    TrafficCounted,
)
from keepstep.model.units import S_NS
from keepstep.ports import Box
from keepstep.sim.protocol.world.boxes import LocalSockets, SimBox
from tests.contracts.simulated import Time

PATH = "keeper.sock"
GONE = "gone"


class Ear:
    """Writes down what it hears, and is done something to by `then`."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.then: Callable[[Box, Any], object] = lambda box, message: None

    def hear(self, box: Box, message: Any, /) -> None:
        self.heard.append(message)
        self.then(box, message)

    def gone(self, box: Box, /) -> None:
        self.heard.append(GONE)


class Node(Protocol):
    """A keeper that listens, and a rank in a process that can be killed."""

    keeper_ear: Ear
    rank_ear: Ear
    told: list[str]  # kinds
    keeper_pid: int
    rank_pid: int

    def join(self) -> Box:
        """The rank's end of a new connection."""

    def keepers_end(self) -> Box:
        """Of the newest connection."""

    def garble(self, box: Box, packet: bytes) -> None:
        """Send that from there, as it is."""

    def join_from_a_process(self) -> None:
        """Which says goodbye, reads nothing, and waits for its end."""

    def kill_process(self) -> None: ...

    def until(self, holds: Callable[[], bool]) -> None: ...

    def close(self) -> None: ...


RANK = """
import socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
for rank in range(3):
    sock.send(b'{"kind":"changed","rank":%d}' % rank)
print(flush=True)
sys.stdin.read()
"""


class RealNode:
    def __init__(self, room: Path) -> None:
        self._loop = Loop()
        self._loop.after(30 * S_NS, self._out_of_patience)
        self._path = room / PATH
        self.keeper_ear, self.rank_ear = Ear(), Ear()
        self.told: list[str] = []
        self.keeper_pid = self.rank_pid = os.getpid()
        self._ends: list[SocketBox] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._server = listen(self._loop, self._path, KEEPER_WITH_NODE, self._accept, self._tell)

    @staticmethod
    def _out_of_patience() -> None:
        raise AssertionError("it does not come about")

    def _accept(self, box: Box) -> Ear:
        assert isinstance(box, SocketBox)
        self._ends.append(box)
        return self.keeper_ear

    def _tell(self, kind: str, why: str) -> None:
        self.told.append(kind)

    def join(self) -> Box:
        box = connect(self._loop, self._path, RANK_WITH_KEEPER, self.rank_ear, self._tell)
        count = len(self._ends)
        self.until(lambda: len(self._ends) > count)
        return box

    def keepers_end(self) -> Box:
        return self._ends[-1]

    def garble(self, box: Box, packet: bytes) -> None:
        assert isinstance(box, SocketBox)
        box._sock.send(packet)

    def join_from_a_process(self) -> None:
        command = [sys.executable, "-c", RANK, str(self._path)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._child.stdout is not None and self._child.stdout.readline()
        self.rank_pid = self._child.pid
        self.until(lambda: len(self._ends) == 1)

    def kill_process(self) -> None:
        assert self._child is not None
        self._child.send_signal(signal.SIGKILL)
        self._child.communicate()

    def until(self, holds: Callable[[], bool]) -> None:
        self._loop.run(holds)

    def close(self) -> None:
        self._server.close()
        if self._child is not None:
            self.kill_process()
        self._loop.close()


class SimNode(Time):
    def __init__(self, room: Path) -> None:
        super().__init__()
        machine = self.machine(0)
        self._keeper = machine.start("keeper")
        self._rank = machine.start("rank")
        self.keeper_pid = self._keeper.pid
        self.rank_pid = self._rank.pid
        self._sockets = LocalSockets(machine)
        self._path = room / PATH
        self.keeper_ear, self.rank_ear = Ear(), Ear()
        self.told: list[str] = []
        self._ends: list[Box] = []
        self._sockets.listen(self._keeper, self._path, KEEPER_WITH_NODE, self._accept, self._tell)

    def _accept(self, box: Box) -> Ear:
        self._ends.append(box)
        return self.keeper_ear

    def _tell(self, kind: str, why: str) -> None:
        self.told.append(kind)

    def join(self) -> Box:
        box = self._sockets.connect(
            self._rank, self._path, RANK_WITH_KEEPER, self.rank_ear, self._tell
        )
        count = len(self._ends)
        self.until(lambda: len(self._ends) > count)
        return box

    def keepers_end(self) -> Box:
        return self._ends[-1]

    def garble(self, box: Box, packet: bytes) -> None:
        assert isinstance(box, SimBox)
        box.send_packet(packet)

    def join_from_a_process(self) -> None:
        box = self.join()
        for rank in range(3):
            box.send(PageChanged(rank))

    def kill_process(self) -> None:
        self._rank.end("killed")

    def close(self) -> None:
        pass


NODES: dict[str, Callable[[Path], Node]] = {"unix sockets": RealNode, "simulated": SimNode}


@pytest.fixture(params=NODES)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    made = NODES[request.param](tmp_path)
    yield made
    made.close()


def test_messages_come_equal_and_in_order_both_ways(node: Node) -> None:
    box = node.join()
    sent = [Goodbye(1, True, "ü" * 1000), CountTraffic(), *map(PageChanged, range(100))]
    assert all(box.send(message) for message in sent)
    assert node.keeper_ear.heard == [], "not while it is sent"
    back = [TrafficCounted({"a": 1}), Released()]
    assert all(node.keepers_end().send(message) for message in back)
    node.until(lambda: len(node.keeper_ear.heard) == len(sent) and len(node.rank_ear.heard) == 2)
    assert node.keeper_ear.heard == sent
    assert node.rank_ear.heard == back


def test_who_hears_is_told_which_connection_it_was(node: Node) -> None:
    heard: list[tuple[Box, Any]] = []
    node.keeper_ear.then = lambda box, message: heard.append((box, message.rank))
    boxes, ends = [], []
    for _ in range(3):
        boxes.append(node.join())
        ends.append(node.keepers_end())
    for number, box in enumerate(boxes):
        box.send(PageChanged(number))
    node.until(lambda: len(heard) == 3)
    assert sorted(heard, key=lambda each: each[1]) == list(zip(ends, range(3), strict=True))


def test_both_ends_know_the_others_process(node: Node) -> None:
    box = node.join()
    assert (box.pid, node.keepers_end().pid) == (node.keeper_pid, node.rank_pid)
    node.until(lambda: True)


def test_the_end_comes_once_and_behind_everything_that_was_sent(node: Node) -> None:
    box = node.join()
    box.send(CountTraffic())
    box.send(PageChanged(7))
    box.close()
    box.close()
    node.until(lambda: GONE in node.keeper_ear.heard)
    assert node.keepers_end().send(Released()) is False
    node.keepers_end().close()
    other = node.join()
    other.send(PageChanged(8))
    node.until(lambda: PageChanged(8) in node.keeper_ear.heard)
    assert node.keeper_ear.heard == [CountTraffic(), PageChanged(7), GONE, PageChanged(8)]


def test_who_hangs_up_hears_nothing_any_more(node: Node) -> None:
    box = node.join()
    node.keepers_end().send(Released())
    box.close()
    assert box.send(CountTraffic()) is False
    box.poke(PageChanged(1))
    node.until(lambda: GONE in node.keeper_ear.heard)
    node.keepers_end().close()
    other = node.join()
    node.keepers_end().send(TrafficCounted({}))
    node.until(lambda: bool(node.rank_ear.heard))
    assert node.rank_ear.heard == [TrafficCounted({})]
    assert node.keeper_ear.heard == [GONE]
    other.close()


def test_who_hears_may_hang_up_and_hears_nothing_of_what_follows(node: Node) -> None:
    node.keeper_ear.then = lambda box, message: box.close()
    box = node.join()
    for rank in range(5):
        box.send(PageChanged(rank))
    node.until(lambda: GONE in node.rank_ear.heard)
    assert node.keeper_ear.heard == [PageChanged(0)]
    assert node.rank_ear.heard == [GONE]


def test_a_process_that_is_killed_is_gone_behind_what_it_said(node: Node) -> None:
    node.join_from_a_process()
    end = node.keepers_end()
    assert end.pid == node.rank_pid
    assert end.send(Released()), "which it will never read"
    node.kill_process()
    node.until(lambda: GONE in node.keeper_ear.heard)
    assert node.keeper_ear.heard == [*map(PageChanged, range(3)), GONE]
    assert end.send(Released()) is False
    end.poke(Released())


def test_a_poke_comes_or_not_and_never_waits(node: Node) -> None:
    node.join_from_a_process()
    node.until(lambda: len(node.keeper_ear.heard) == 3)
    for _ in range(5000):
        node.keepers_end().poke(Released())
    box = node.join()
    for rank in range(200):
        box.poke(PageChanged(rank))
    box.send(CountTraffic())
    node.until(lambda: CountTraffic() in node.keeper_ear.heard)
    pokes = [message.rank for message in node.keeper_ear.heard[3:-1]]
    assert len(pokes) > 100
    assert pokes == sorted(set(pokes))


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"hello",
        b"\xff\xfe",
        b"[1, 2]",
        b'{"kind":"shout"}',
        b'{"kind":"changed"}',
        b"3" * 70_000,
    ],
    ids=["empty", "no JSON", "no text", "a list", "unknown", "a field short", "too large"],
)
def test_what_is_no_message_is_told_and_answered_and_ends_nothing(
    node: Node, packet: bytes
) -> None:
    box = node.join()
    node.garble(box, packet)
    box.send(PageChanged(3))
    node.until(lambda: bool(node.keeper_ear.heard) and bool(node.rank_ear.heard))
    assert node.keeper_ear.heard == [PageChanged(3)]
    assert [type(message) for message in node.rank_ear.heard] == [NotUnderstood]
    assert node.told == ["message-refused"]
    assert node.keepers_end().refused == 1  # type: ignore[attr-defined]
    box.send(PageChanged(4))
    node.until(lambda: len(node.keeper_ear.heard) == 2)


def test_what_the_other_end_would_not_understand_is_not_sent(node: Node) -> None:
    box = node.join()
    for message in (Released(), PageChanged(-1), "hello", {"kind": "changed", "rank": 1}):
        with pytest.raises(NotAMessage):
            box.send(message)
        with pytest.raises(NotAMessage):
            box.poke(message)
    box.send(PageChanged(1))
    node.until(lambda: bool(node.keeper_ear.heard))
    assert node.keeper_ear.heard == [PageChanged(1)]


def test_a_connection_may_end_before_it_is_heard(node: Node) -> None:
    box = node.join()
    box.close()
    node.until(lambda: GONE in node.keeper_ear.heard)
    assert node.keeper_ear.heard == [GONE]
