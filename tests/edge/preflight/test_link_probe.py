"""A link measured over loopback, and doors that strangers knock at."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from keepstep.edge.preflight.link_probe import (
    BACK,
    CLOCK,
    MOST_BYTES,
    ProbeDoor,
    ProbeEffort,
    probe,
)
from keepstep.model.messages.preflight import ClockGap
from keepstep.model.units import MS_NS, S_NS

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


def test_the_others_clock_is_read_within_a_bound(
    door: ProbeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Door and prober share this clock; then one of them is 3 s ahead, by turns."""
    clock = ProbeEffort(samples=0)
    true = probe((HOST, door.port), HOST, TOKEN, 20.0, clock)
    assert true.there == true.back == true.round_trips == ()
    assert true.clock is not None and abs(true.clock.ahead_ns) <= true.clock.within_ns
    assert true.clock.within_ns < S_NS
    now_ns, mine = time.time_ns, threading.get_ident()

    def ahead(of_mine_ns: int, of_the_doors_ns: int) -> ClockGap:
        def time_ns() -> int:
            is_mine = threading.get_ident() == mine
            return now_ns() + (of_mine_ns if is_mine else of_the_doors_ns)

        monkeypatch.setattr(time, "time_ns", time_ns)
        found = probe((HOST, door.port), HOST, TOKEN, 20.0, clock).clock
        assert found is not None and found.within_ns < S_NS
        return found

    found = ahead(0, 3 * S_NS)
    assert abs(found.ahead_ns - 3 * S_NS) <= found.within_ns
    found = ahead(3 * S_NS, 0)
    assert abs(found.ahead_ns + 3 * S_NS) <= found.within_ns


def busy(for_ns: int) -> None:
    until_ns = time.monotonic_ns() + for_ns
    while time.monotonic_ns() < until_ns:
        pass


def test_what_holds_up_an_answer_is_in_the_bound(
    door: ProbeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both here and there, before the clock is read and after it."""
    now_ns = time.time_ns

    def held_up() -> int:
        busy(2 * MS_NS)
        found = now_ns()
        busy(2 * MS_NS)
        return found

    monkeypatch.setattr(time, "time_ns", held_up)
    clock = probe((HOST, door.port), HOST, TOKEN, 20.0, ProbeEffort(samples=0)).clock
    assert clock is not None and abs(clock.ahead_ns) <= clock.within_ns
    assert clock.within_ns >= 4 * MS_NS


def test_a_door_that_tells_no_time_is_measured_all_the_same(
    door: ProbeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a version that does not know the word: it ends the connection."""
    answer = door._answer_one

    def of_yesterday(peer: socket.socket) -> bool:
        word = peer.recv(9, socket.MSG_PEEK | socket.MSG_WAITALL)[0]
        return word != CLOCK and answer(peer)

    monkeypatch.setattr(door, "_answer_one", of_yesterday)
    samples = probe((HOST, door.port), HOST, TOKEN, 20.0, QUICK)
    assert samples.clock is None and len(samples.there) == len(samples.back) == 3


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
