"""Boxes over unix sockets, beyond `tests/contracts/test_boxes.py`: who may connect, and a peer that
does not read."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.core.wire.conversations import KEEPER_WITH_NODE, RANK_WITH_KEEPER
from keepstep.edge.net.boxes import (
    ACCEPT_AGAIN_NS,
    MAX_ANSWERS,
    MAX_UNSENT_BYTES,
    SocketBox,
    connect,
    listen,
)
from keepstep.edge.os.loop import Loop
from keepstep.model.bounds import MAX_PACKET_BYTES
from keepstep.model.messages.keeper_rank import (
    Goodbye,
    NotUnderstood,
    PageChanged,
    Released,
)
from keepstep.model.units import S_NS
from keepstep.ports import Box

GONE = "gone"


class Room:
    """A server, whose newest connection is `box`, and what was heard there and told."""

    def __init__(self, path: Path) -> None:
        self.loop, self.path = Loop(), path
        self.loop.after(30 * S_NS, self._out_of_patience)
        self.heard: list[Any] = []
        self.told: list[tuple[str, str]] = []
        self.box: SocketBox | None = None
        self.server = listen(
            self.loop, path, KEEPER_WITH_NODE, self._accept, self._tell, uid=os.getuid()
        )

    @staticmethod
    def _out_of_patience() -> None:
        raise AssertionError("it does not come about")

    def _accept(self, box: Box) -> Room:
        assert isinstance(box, SocketBox)
        self.box = box
        return self

    def _tell(self, kind: str, why: str) -> None:
        self.told.append((kind, why))

    def hear(self, box: Box, message: Any, /) -> None:
        self.heard.append(message)

    def gone(self, box: Box, /) -> None:
        self.heard.append(GONE)

    def connect(self) -> socket.socket:
        """The other end as it is, without a loop."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(self.path))
        self.until(lambda: self.box is not None)
        return sock

    def until(self, holds: Callable[[], bool]) -> None:
        self.loop.run(holds)

    def let_go(self) -> None:
        """One more turn of the loop."""
        turned: list[int] = []
        self.loop.post(lambda: turned.append(1))
        self.loop.run(lambda: bool(turned))

    def close(self) -> None:
        self.server.close()
        self.loop.close()


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    made = Room(tmp_path / "box.sock")
    yield made
    made.close()


def test_the_server_refuses_another_users_process_and_says_so(room: Room, tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "other.sock"
    server = listen(
        room.loop,
        path,
        KEEPER_WITH_NODE,
        lambda box: pytest.fail("accepted"),
        lambda kind, why: told.extend((kind, why)),
        uid=os.getuid() + 1,
    )
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(str(path))
    room.until(lambda: bool(told))
    assert stranger.recv(100) == b""
    assert told[0] == "stranger-refused"
    assert f"process {os.getpid()} of user {os.getuid()}" in told[1]
    stranger.close()
    server.close()


def test_who_comes_when_no_descriptor_is_left_waits_and_is_taken_later(room: Room) -> None:
    came = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    came.connect(str(room.path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        tries: list[int] = []
        for number in (1, 2, 3):
            room.loop.after(number * ACCEPT_AGAIN_NS, partial(tries.append, number))
        room.until(lambda: len(tries) == 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [kind for kind, _ in room.told] == ["connection-refused"] and room.box is None
    room.until(lambda: room.box is not None)
    came.close()


def test_nobody_connects_to_another_users_server(room: Room) -> None:
    ends = (room.loop, room.path, RANK_WITH_KEEPER, room, room._tell)
    with pytest.raises(PermissionError):
        connect(*ends, uid=os.getuid() + 1)


def test_nobody_there_is_an_error(room: Room) -> None:
    room.server.close()
    assert not room.path.exists()
    with pytest.raises(FileNotFoundError):
        connect(room.loop, room.path, RANK_WITH_KEEPER, room, room._tell)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(room.path))
    with pytest.raises(ConnectionRefusedError):
        connect(room.loop, room.path, RANK_WITH_KEEPER, room, room._tell)


def test_only_the_owner_can_connect_at_all(room: Room) -> None:
    assert room.path.stat().st_mode & 0o777 == 0o600


def test_what_a_peer_does_not_read_waits_and_arrives_in_order(room: Room) -> None:
    peer = room.connect()
    assert room.box is not None
    count = 1000  # more than the kernel keeps
    for number in range(count):
        assert room.box.send(NotUnderstood(f"{number} {'x' * 900}"))
        room.box.poke(Released())
    found: list[str] = []
    peer.setblocking(False)

    def read() -> bool:
        try:
            message = RANK_WITH_KEEPER.decode(peer.recv(MAX_PACKET_BYTES))
        except BlockingIOError:
            room.let_go()
        else:
            if isinstance(message, NotUnderstood):
                found.append(message.why.split()[0])
        return len(found) == count

    while not read():
        pass
    assert found == [str(number) for number in range(count)]
    peer.close()
    room.until(lambda: room.heard == [GONE])


def test_a_poke_does_not_overtake_what_waits(room: Room) -> None:
    peer = room.connect()
    assert room.box is not None
    for number in range(1000):
        room.box.send(NotUnderstood(f"{number} {'x' * 900}"))
    for _ in range(10):
        assert peer.recv(MAX_PACKET_BYTES)
    room.box.poke(Released())  # there would be room for it now
    peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            assert isinstance(RANK_WITH_KEEPER.decode(peer.recv(MAX_PACKET_BYTES)), NotUnderstood)
    peer.close()


def test_what_waits_when_the_box_is_closed_is_sent_before_the_end(room: Room) -> None:
    peer = room.connect()
    assert room.box is not None
    for number in range(1000):
        room.box.send(NotUnderstood(f"{number} {'x' * 900}"))
    room.box.close()
    assert not room.box.send(Released())
    peer.setblocking(False)
    count = 0
    while True:
        try:
            packet = peer.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            room.let_go()
            continue
        if not packet:
            break
        count += 1
    assert count == 1000
    peer.close()
    assert room.heard == []


def test_a_peer_that_never_reads_is_given_up(room: Room) -> None:
    peer = room.connect()
    assert room.box is not None
    sent = 0
    while room.box.send(NotUnderstood("x" * 1000)):
        sent += 1
    assert sent * 1000 > MAX_UNSENT_BYTES / 2
    assert room.heard == [], "not while it is sent"
    room.until(lambda: bool(room.heard))
    assert room.heard == [GONE]
    assert not room.box.send(Released())
    peer.close()


def test_a_peer_that_dies_with_words_unread_ends_the_waiting_too(room: Room) -> None:
    peer = room.connect()
    assert room.box is not None
    for _ in range(1000):
        room.box.send(NotUnderstood("x" * 1000))
    peer.send(RANK_WITH_KEEPER.encode(Goodbye(1, True, "bye")))
    peer.close()
    room.until(lambda: GONE in room.heard)
    assert room.heard == [Goodbye(1, True, "bye"), GONE]
    room.let_go()


def test_nonsense_is_not_answered_for_ever(room: Room) -> None:
    peer = room.connect()
    assert room.box is not None
    for number in range(MAX_ANSWERS + 50):
        peer.send(b"nonsense")
        room.until(lambda number=number: len(room.told) == number + 1)  # type: ignore[misc]
    assert room.box.refused == MAX_ANSWERS + 50
    peer.setblocking(False)
    answers = 0
    with pytest.raises(BlockingIOError):
        while True:
            assert isinstance(RANK_WITH_KEEPER.decode(peer.recv(MAX_PACKET_BYTES)), NotUnderstood)
            answers += 1
    assert answers == MAX_ANSWERS
    peer.send(RANK_WITH_KEEPER.encode(PageChanged(1)))
    room.until(lambda: room.heard == [PageChanged(1)])
    peer.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.binary(min_size=1, max_size=200))
def test_no_bytes_end_a_connection(room: Room, packet: bytes) -> None:
    room.heard.clear()
    room.box = None
    peer = room.connect()
    peer.send(packet)
    peer.send(RANK_WITH_KEEPER.encode(PageChanged(5)))
    peer.close()
    room.until(lambda: GONE in room.heard)
    assert room.heard == [PageChanged(5), GONE]


def test_a_forked_child_can_let_go_of_a_connection_and_the_end_is_seen(room: Room) -> None:
    peer = room.connect()
    assert room.box is not None
    ready, may_end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        room.box.release()
        peer.close()
        os.write(ready[1], b"x")
        os.read(may_end[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    peer.send(RANK_WITH_KEEPER.encode(PageChanged(2)))
    room.until(lambda: room.heard == [PageChanged(2)])
    room.box.close()
    assert peer.recv(100) == b""
    os.write(may_end[1], b"x")
    os.waitpid(child, 0)
    peer.close()
    for fd in (*ready, *may_end):
        os.close(fd)
