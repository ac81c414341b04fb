"""The embedded KV's meeting point: one hosts it, it is found or its absence is said, and its loss
is."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import DistNetworkError, TCPStore

from keepstep.core.detection.diagnosis import ExitFacts, explain_exit
from keepstep.edge.os.loop import Loop
from keepstep.edge.torch import tcp_store
from keepstep.edge.torch.tcp_store import is_local, join_store, meet_embedded, open_embedded
from keepstep.errors import MeetingError
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import KV
from keepstep.sim.protocol.job.collectives import STORE_GONE
from keepstep.testing.etcd import free_ports

PATIENCE_S = 30.0


class Opening:
    """A store that is being opened, the loop, and what it was told."""

    def __init__(self, loop: Loop, endpoint: tuple[str, int], within_s: float = PATIENCE_S) -> None:
        self.opened: list[KV] = []
        self.failed: list[str] = []
        self.lost: list[str] = []
        self.told: list[str] = []
        self.timer = open_embedded(
            loop,
            endpoint,
            "j/",
            self.opened.append,
            self.failed.append,
            self.lost.append,
            within_s,
            self.told.append,
        )


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    made.after(int(PATIENCE_S) * S_NS, lambda: pytest.fail("it does not come about"))
    yield made
    made.close()


def let_threads_end(loop: Loop, before: set[threading.Thread]) -> None:
    """One in torch's store may abort the interpreter at its end."""

    def look() -> None:
        loop.after(10 * MS_NS, look)

    look()
    loop.run(lambda: set(threading.enumerate()) <= before)


def test_of_many_that_open_it_one_hosts_it_and_all_find_the_same(loop: Loop) -> None:
    before = set(threading.enumerate())
    endpoint = ("127.0.0.1", free_port())
    openings = [Opening(loop, endpoint) for _ in range(6)]
    loop.run(lambda: all(opening.opened for opening in openings))
    clients = [opening.opened[0] for opening in openings]
    assert sum(client.hosted for client in clients) == 1
    told: list[str | None] = []
    for number, client in enumerate(clients):
        client.swap("k", None, str(number), told.append)
    loop.run(lambda: len(told) == 6)
    assert len(set(told)) == 1
    for client in clients:
        client.close()
    let_threads_end(loop, before)
    assert not any(opening.lost or opening.failed for opening in openings)


def test_nobody_there_is_a_failed_opening_and_may_be_cancelled(loop: Loop) -> None:
    before = set(threading.enumerate())
    endpoint = ("no.such.host.invalid", 9)
    patient, hasty = Opening(loop, endpoint), Opening(loop, endpoint, 0.0)
    loop.run(lambda: bool(hasty.failed))
    assert "no.such.host.invalid:9" in hasty.failed[0]
    patient.timer.cancel()
    let_threads_end(loop, before)
    assert patient.opened == patient.failed == patient.lost == hasty.opened == []


def test_a_meeting_point_that_does_not_answer_is_told_once(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_store, "TELL_AFTER_S", 0.2)
    before = set(threading.enumerate())
    silent = socket.create_server(("127.0.0.1", 0))
    endpoint = silent.getsockname()
    waits, given_up = Opening(loop, endpoint, 1.0), Opening(loop, endpoint, 1.0)
    given_up.timer.cancel()
    there = Opening(loop, ("127.0.0.1", free_port()))
    loop.run(lambda: bool(waits.told and there.opened))
    there.opened[0].close()
    silent.close()
    loop.run(lambda: bool(waits.failed))
    let_threads_end(loop, before)
    assert len(waits.told) == 1 and waits.told[0].startswith(
        f"waiting for the meeting point at 127.0.0.1:{endpoint[1]}: nothing has answered there "
    )
    assert given_up.told == there.told == []


def test_a_host_that_is_killed_is_a_lost_memory_for_who_waits_and_who_asks(loop: Loop) -> None:
    before = set(threading.enumerate())
    endpoint = ("127.0.0.1", free_port())
    with hosting_process(endpoint[1]) as host:
        waits, asks = Opening(loop, endpoint), Opening(loop, endpoint)
        loop.run(lambda: bool(waits.opened and asks.opened))
        assert not waits.opened[0].hosted
        heard: list[object] = []
        asks.opened[0].swap("x", None, "y", heard.append)
        waits.opened[0].wait(["x"], None, heard.append)
        loop.run(lambda: len(heard) == 2)
        # over the connection that has waited: torch tries for long to make one to a dead host
        waits.opened[0].wait(["k"], None, lambda found: pytest.fail("answered"))
        host.kill()
        host.wait()
        asks.opened[0].read(["x"], lambda found: pytest.fail("answered"))
        loop.run(lambda: bool(waits.lost and asks.lost))
    for opening in (waits, asks):
        assert len(opening.lost) == 1
        assert f"127.0.0.1:{endpoint[1]} is gone" in opening.lost[0]
    let_threads_end(loop, before)


def free_port() -> int:
    return free_ports(1)[0]


def test_one_of_many_on_the_endpoints_machine_hosts_the_store() -> None:
    endpoint = ("127.0.0.1", free_port())
    with ThreadPoolExecutor(6) as threads:
        met = list(threads.map(lambda _: meet_embedded(endpoint, "j/", PATIENCE_S), range(6)))
    assert sum(kv.hosted for kv in met) == 1
    assert len({kv.swap("k", None, str(i)) for i, kv in enumerate(met)}) == 1, "all read the same"


def test_a_store_that_is_there_already_is_used() -> None:
    endpoint = ("127.0.0.1", free_port())
    first, second = meet_embedded(endpoint, "j/"), meet_embedded(endpoint, "j/")
    assert first.hosted and not second.hosted
    assert first.swap("x", None, "a") == "a" == second.swap("x", None, "b")


def test_a_stranger_s_bytes_that_are_no_text_are_read_and_taken_out() -> None:
    endpoint = ("127.0.0.1", free_port())
    kv = meet_embedded(endpoint, "j/")
    stranger = TCPStore(*endpoint, is_master=False)
    stranger.set("j/verdict", b"\xff\xfe\x80")
    [found] = kv.read(["verdict"])
    assert found is not None and kv.wait(["verdict"], None) == [found]
    assert kv.swap("verdict", None, "ours") == found, "somebody was first"
    assert kv.swap("verdict", found, "ours") == "ours" == kv.read(["verdict"])[0]


def test_nobody_at_the_endpoint_is_said_with_its_name() -> None:
    sentence = (
        r"expected the other nodes' meeting point at no\.such\.host\.invalid:9, "
        "found nobody there within 0 s"
    )
    with pytest.raises(MeetingError, match=sentence):
        meet_embedded(("no.such.host.invalid", 9), "j/", within_s=0.0)


def test_who_gives_up_does_not_wait() -> None:
    with pytest.raises(MeetingError, match=r"left before no\.such\.host\.invalid:9 was found"):
        meet_embedded(("no.such.host.invalid", 9), "j/", given_up=lambda: True)


HOST = """
import sys
from keepstep.edge.torch.tcp_store import meet_embedded
kv = meet_embedded(("127.0.0.1", int(sys.argv[1])), "j/")
assert kv.hosted
print("hosts", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def hosting_process(port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOST, str(port)]
    host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout and host.stdout.readline() == "hosts\n"
        yield host
    finally:
        host.kill()
        host.communicate()


def test_what_torch_says_of_a_store_that_ended_is_no_error_of_the_program() -> None:
    host = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    waiting = TCPStore("127.0.0.1", host.port, None, False, wait_for_workers=False)
    del host
    with pytest.raises(DistNetworkError) as raised:
        waiting.get("never written")
    says = f"{type(raised.value).__name__}: {raised.value}"
    assert says == STORE_GONE
    assert explain_exit(ExitFacts(rank=1, node=0, code=1, message=says)).kind == "unknown"


def test_a_lost_store_is_said_to_who_blocks() -> None:
    endpoint = ("127.0.0.1", free_port())
    with hosting_process(endpoint[1]) as host:
        kv = meet_embedded(endpoint, "j/", PATIENCE_S)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(kv.another().wait, ["k"], None)
            kv.swap("x", None, "y")
            host.kill()
            with pytest.raises(
                MeetingError, match=rf"the meeting point 127\.0\.0\.1:{endpoint[1]} is gone"
            ):
                waiting.result(PATIENCE_S)
        for ask in (lambda: kv.read(["k"]), kv.another):
            with pytest.raises(MeetingError):
                ask()


def test_a_connection_that_takes_too_long_is_tried_again_while_the_host_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = ("127.0.0.1", free_port())
    kv = meet_embedded(endpoint, "j/", PATIENCE_S)
    kv.swap("k", None, "x")
    late = 0

    def join_late(where: tuple[str, int], within_s: float) -> object:
        nonlocal late
        if late < most_late:
            late += 1
            raise DistNetworkError("timed out")
        return join_store(where, within_s)

    monkeypatch.setattr(tcp_store, "join_store", join_late)
    most_late = 2
    assert kv.another().read(["k"]) == ["x"]
    assert late == 2
    most_late = 100
    with pytest.raises(MeetingError, match="timed out"):
        kv.another()


def test_something_else_at_the_endpoint_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # the end of the test
                while True:
                    server.accept()[0].close()

        thread.submit(hang_up)
        with pytest.raises(MeetingError, match=r"expected a TCPStore at 127\.0\.0\.1:"):
            meet_embedded(server.getsockname(), "j/", within_s=0.0)
        server.shutdown(socket.SHUT_RDWR)


def test_whose_address_it_is() -> None:
    assert (
        is_local("127.0.0.7")
        and not is_local("203.0.113.9")
        and not is_local("no.such.host.invalid")
    )
