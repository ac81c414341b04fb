"""Rendezvous over a real TCPStore: a seat is taken once, the first verdict counts, and who waits is
woken."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from keepstep.edge.torch.rendezvous import CALLED_OFF, Rendezvous, local_address, open_store
from keepstep.model.rounds import NOBODY, Arrival, Verdict

from keepstep.edge.torch.tcp_store import meet_embedded
from keepstep.errors import ConfigError, MeetingError
from keepstep.model.failure import Cause, Failure
from keepstep.testing.etcd import free_ports

PATIENCE_S = 30.0


def arrival(name: str) -> Arrival:
    return Arrival(name, "127.0.0.1", 1, 1, 1, 2)


@pytest.fixture
def point() -> Rendezvous:
    return Rendezvous(meet_embedded(("127.0.0.1", free_ports(1)[0]), "j/"))


def test_the_first_opening_counts(point: Rendezvous) -> None:
    assert point.opening("a") == "a" == point.another().opening("b")


def test_a_seat_is_taken_once(point: Rendezvous) -> None:
    clients = [point, *(point.another() for _ in range(5))]
    with ThreadPoolExecutor(6) as threads:
        takers = list(
            threads.map(lambda c: c[1].seat(0, 0, arrival(str(c[0]))), enumerate(clients))
        )
    assert len(set(takers)) == 1
    assert point.seats(0, 2) == [takers[0], None]
    second = arrival("second")
    assert point.seat(0, 1, second) == second
    assert point.seats(0, 2) == [takers[0], second]


def test_who_comes_to_a_closed_round_finds_no_seat(point: Rendezvous) -> None:
    first = arrival("first")
    point.seat(0, 0, first)
    with ThreadPoolExecutor(2) as threads:
        for closing in [threads.submit(point.another().close, 0, 3) for _ in range(2)]:
            closing.result(PATIENCE_S)
    assert point.seats(0, 3) == [first, NOBODY, NOBODY] and point.marks(0, "full") == ["yes"]
    assert point.seat(0, 2, arrival("late")) == NOBODY


def test_the_first_verdict_counts(point: Rendezvous) -> None:
    again, stop = (
        Verdict("again", "first", failure=Failure(Cause.CRASH, 1, "a", step=3), vacant=(1,)),
        Verdict("stop", "second", code=1),
    )
    assert point.verdict(3) is None
    assert point.say(3, again) == again
    assert point.say(3, stop) == again
    assert point.verdict(3) == again
    assert point.say(4, stop) == stop, "rounds have their own"


def test_a_verdict_wakes_who_waits_for_it_while_others_talk(point: Rendezvous) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(point.another().wait_for_verdict, 0)
        assert point.mark(0, "x") == "yes" and not waiting.done()
        said = point.say(0, Verdict("again", "why"))
        assert waiting.result(PATIENCE_S) == said


def test_marks_are_waited_for_together_and_not_for_ever(point: Rendezvous) -> None:
    point.mark(0, "ready", 0, "a")
    assert point.wait_for_marks(0, "ready", range(2), within_s=0.05) is None
    assert point.marks(0, "ready", range(2)) == ["a", None]
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(point.another().wait_for_marks, 0, "ready", range(2), PATIENCE_S)
        point.mark(0, "ready", 1, "b")
        assert waiting.result(PATIENCE_S) == ["a", "b"]
    assert point.marks(0, "ready", range(2)) == ["a", "b"]


def test_who_waits_for_a_round_that_is_called_off_is_woken(point: Rendezvous) -> None:
    point.mark(0, "ready", 1, "there")
    with ThreadPoolExecutor(2) as threads:
        full = threads.submit(point.another().wait_for_marks, 0, "full", (0,), PATIENCE_S)
        ready = threads.submit(point.another().wait_for_marks, 0, "ready", range(3), PATIENCE_S)
        point.call_off(0, 3)
        assert full.result(PATIENCE_S) == ["yes"]
        assert ready.result(PATIENCE_S) == [CALLED_OFF, "there", CALLED_OFF]
    assert point.mark(0, "ready", 2, "late") == CALLED_OFF


def test_own_address() -> None:
    assert local_address(("127.0.0.1", 1)) == local_address(("localhost", 1)) == "127.0.0.1"
    with pytest.raises(
        ConfigError, match="expected a reachable host, found 'no.such.host.invalid'"
    ):
        local_address(("no.such.host.invalid", 1))


def test_a_name_that_is_loopback_only_here_is_refused() -> None:
    """As Debian's /etc/hosts has it for the machine's own name; `0` is another name of loopback
    that every resolver knows."""
    with pytest.raises(ConfigError, match="found that '0' means 127.0.0.1 here: set --host"):
        local_address(("0", 1))


def test_a_taken_port_for_the_ranks_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(MeetingError, match=r"for the ranks to meet at 127\.0\.0\.1:"),
    ):
        open_store("127.0.0.1", server.getsockname()[1])
