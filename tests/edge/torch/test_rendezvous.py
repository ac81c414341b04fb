"""Rendezvous on real TCPStores: the first writer wins, waiting ends when it should, and a lost store is said."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from keepstep.edge.torch.rendezvous import Rendezvous, is_local, local_address, meet, open_store
from keepstep.errors import ConfigError, MeetingError
from keepstep.model.rounds import Arrival, Verdict

PATIENCE_S = 30.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def arrival(name: str) -> Arrival:
    return Arrival(name, "127.0.0.1", 1, 1, 1, 2)


@pytest.fixture
def point() -> Iterator[Rendezvous]:
    point, store = meet(("127.0.0.1", free_port()), "j")
    assert store is not None
    yield point
    del store


def test_one_of_many_on_the_endpoints_machine_hosts_the_store() -> None:
    endpoint = ("127.0.0.1", free_port())
    with ThreadPoolExecutor(6) as threads:
        met = list(threads.map(lambda _: meet(endpoint, "j", PATIENCE_S), range(6)))
    assert sum(store is not None for _, store in met) == 1
    assert {point.opening(str(i)) for i, (point, _) in enumerate(met)} == {met[0][0].opening("late")}, "all read the same"


def test_a_store_that_is_there_already_is_used() -> None:
    endpoint = ("127.0.0.1", free_port())
    first, store = meet(endpoint, "j")
    assert store is not None
    second, none = meet(endpoint, "j")
    assert none is None
    assert first.mark(0, "x", text="a") == "a" == second.mark(0, "x", text="b")


def test_nobody_at_the_endpoint_is_said_with_its_name() -> None:
    sentence = r"expected the other nodes' meeting point at no\.such\.host\.invalid:9, found nobody there within 0 s"
    with pytest.raises(MeetingError, match=sentence):
        meet(("no.such.host.invalid", 9), "j", within_s=0.0)


def test_who_gives_up_does_not_wait() -> None:
    with pytest.raises(MeetingError, match=r"left before no\.such\.host\.invalid:9 was found"):
        meet(("no.such.host.invalid", 9), "j", given_up=lambda: True)


def test_jobs_do_not_see_each_other(point: Rendezvous) -> None:
    other = Rendezvous(point._endpoint, "k", point._store)
    assert point.say(0, Verdict("done", "j")).why == "j"
    assert other.verdict(0) is None


def test_a_seat_is_taken_once(point: Rendezvous) -> None:
    clients = [point, *(point.another() for _ in range(5))]
    with ThreadPoolExecutor(6) as threads:
        takers = list(threads.map(lambda c: c[1].seat(0, 0, arrival(str(c[0]))), enumerate(clients)))
    assert len(set(takers)) == 1
    assert point.seats_taken(0, 2) == [0]
    second = arrival("second")
    assert point.seat(0, 1, second) == second
    assert point.seated(0, 2) == [takers[0], second]


def test_the_first_verdict_counts(point: Rendezvous) -> None:
    again, stop = Verdict("again", "first", crash=True), Verdict("stop", "second", code=1)
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
    assert not point.marked(0, "ready", range(2))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(point.another().wait_for_marks, 0, "ready", range(2), PATIENCE_S)
        point.mark(0, "ready", 1, "b")
        assert waiting.result(PATIENCE_S) == ["a", "b"]
    assert point.marked(0, "ready", range(2))


HOST = """
import sys
from keepstep.edge.torch.rendezvous import meet
point, store = meet(("127.0.0.1", int(sys.argv[1])), "j")
assert store is not None
print("hosts", flush=True)
sys.stdin.read()
"""


def test_a_lost_store_is_said_to_who_waits_and_to_who_asks() -> None:
    endpoint = ("127.0.0.1", free_port())
    host = subprocess.Popen([sys.executable, "-c", HOST, str(endpoint[1])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout and host.stdout.readline() == "hosts\n"
        point, _ = meet(endpoint, "j", PATIENCE_S)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(point.another().wait_for_verdict, 0)
            point.mark(0, "x")
            host.kill()
            with pytest.raises(MeetingError, match=rf"the meeting point 127\.0\.0\.1:{endpoint[1]} is gone"):
                waiting.result(PATIENCE_S)
        with pytest.raises(MeetingError):
            point.verdict(0)
    finally:
        host.kill()
        host.communicate()


def test_something_else_at_the_endpoint_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # the end of the test
                while True:
                    server.accept()[0].close()

        thread.submit(hang_up)
        with pytest.raises(MeetingError, match=r"expected a TCPStore at 127\.0\.0\.1:"):
            meet(server.getsockname(), "j", within_s=0.0)
        server.shutdown(socket.SHUT_RDWR)


def test_own_address() -> None:
    assert local_address(("127.0.0.1", 1)) == local_address(("localhost", 1)) == "127.0.0.1"
    assert is_local("127.0.0.7") and not is_local("203.0.113.9") and not is_local("no.such.host.invalid")
    with pytest.raises(ConfigError, match="expected a reachable host, found 'no.such.host.invalid'"):
        local_address(("no.such.host.invalid", 1))


def test_a_name_that_is_loopback_only_here_is_refused() -> None:
    """As Debian's /etc/hosts has it for the machine's own name; `0` is another name of loopback that every resolver knows."""
    with pytest.raises(ConfigError, match="found that '0' means 127.0.0.1 here: set --host"):
        local_address(("0", 1))


def test_a_taken_port_for_the_ranks_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(MeetingError, match=r"for the ranks to meet at 127\.0\.0\.1:"):
        open_store("127.0.0.1", server.getsockname()[1])
