"""A link measured over loopback, and doors that strangers knock at."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from keepstep.edge.preflight.link_probe import BACK, MOST_BYTES, ProbeDoor, ProbeEffort, probe

HOST = "127.0.0.1"
TOKEN = "0123456789abcdef" * 2
QUICK = ProbeEffort(samples=3, burst_s=0.002, least_bytes=10_000, most_bytes=300_000)


@pytest.fixture
def door() -> Iterator[ProbeDoor]:
    door = ProbeDoor(HOST, TOKEN, patience_s=5.0)
    yield door
    door.close()


def test_both_directions_are_measured(door: ProbeDoor) -> None:
    for _ in range(2):  # one after the other
        samples = probe((HOST, door.port), HOST, TOKEN, 20.0, QUICK)
        assert [len(each) for each in (samples.there, samples.back, samples.round_trips)] == [3] * 3
        assert min(*samples.there, *samples.back, *samples.round_trips) > 0


def test_a_stranger_is_dropped(door: ProbeDoor) -> None:
    with pytest.raises(OSError):
        probe((HOST, door.port), HOST, "f" * 32, 5.0, QUICK)
    probe((HOST, door.port), HOST, TOKEN, 20.0, QUICK)


@pytest.mark.parametrize("size", [MOST_BYTES + 1, (1 << 64) - 1])
def test_nobody_has_more_sent_than_the_bound(door: ProbeDoor, size: int) -> None:
    with socket.create_connection((HOST, door.port), 5) as peer:
        peer.sendall(TOKEN.encode() + struct.pack("!BQ", BACK, size))
        assert peer.recv(1) == b""


def test_an_unknown_word_ends_the_connection(door: ProbeDoor) -> None:
    with socket.create_connection((HOST, door.port), 5) as peer:
        peer.sendall(TOKEN.encode() + struct.pack("!BQ", 9, 1))
        assert peer.recv(1) == b""


def test_who_does_not_answer_costs_no_more_than_the_limit() -> None:
    with socket.create_server((HOST, 0)) as silent, pytest.raises(OSError):
        probe((HOST, silent.getsockname()[1]), HOST, TOKEN, 0.3, QUICK)


def test_who_stops_in_the_middle_does_neither() -> None:
    """It answers pings, and takes no more bytes."""

    def serve(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer:
            peer.recv(32, socket.MSG_WAITALL)
            while peer.recv(9, socket.MSG_WAITALL)[:1] == b"\0":
                peer.sendall(bytes(9))
            over.wait(20)

    over = threading.Event()
    with socket.create_server((HOST, 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        with pytest.raises(OSError):
            probe((HOST, server.getsockname()[1]), HOST, TOKEN, 0.5, QUICK)
        over.set()
        thread.join()


def test_a_closed_door_refuses() -> None:
    door = ProbeDoor(HOST, TOKEN)
    door.close()
    with pytest.raises(ConnectionError):
        probe((HOST, door.port), HOST, TOKEN, 1.0, QUICK)
