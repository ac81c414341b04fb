"""The embedded KV's meeting point: one hosts it, it is found or its absence is said, and its loss
is."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from keepstep.edge.torch.tcp_store import is_local, meet_embedded
from keepstep.errors import MeetingError
from keepstep.testing.etcd import free_ports

PATIENCE_S = 30.0


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


def test_a_lost_store_is_said_to_who_waits_and_to_who_asks() -> None:
    endpoint = ("127.0.0.1", free_port())
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(endpoint[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert host.stdout and host.stdout.readline() == "hosts\n"
        kv = meet_embedded(endpoint, "j/", PATIENCE_S)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(kv.another().wait, ["k"], None)
            kv.swap("x", None, "y")
            host.kill()
            with pytest.raises(
                MeetingError, match=rf"the meeting point 127\.0\.0\.1:{endpoint[1]} is gone"
            ):
                waiting.result(PATIENCE_S)
        with pytest.raises(MeetingError):
            kv.read(["k"])
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
            meet_embedded(server.getsockname(), "j/", within_s=0.0)
        server.shutdown(socket.SHUT_RDWR)


def test_whose_address_it_is() -> None:
    assert (
        is_local("127.0.0.7")
        and not is_local("203.0.113.9")
        and not is_local("no.such.host.invalid")
    )
