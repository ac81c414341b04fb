"""A flood of strangers at a keeper's port, and at the metrics': connections that say nothing, and
hellos that end in the middle."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import pytest

from keepstep.config import job_dir_of
from keepstep.core.wire.connection import MAGIC, refusal_record
from keepstep.core.wire.knock import Knocker, knock_key
from keepstep.edge.net.tcp import TcpOptions
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import read_node_safety
from keepstep.model.messages.peers import RanksEnded
from keepstep.model.wire import Refusal
from tests.edge.net.test_peers import LIMIT_S, PATIENT, Ear, Town, link, town
from tests.processes.test_run_nodes import until
from tests.security.test_wire import stack
from tests.security.two_nodes import SECRET, Job, job, machines

__all__ = ["job", "machines", "stack", "town"]  # fixtures
pytestmark = pytest.mark.timeout(200)

Address = tuple[str, int]


@contextmanager
def strangers(address: Address, source: str, count: int) -> Iterator[list[int]]:
    """So many connections at once from one address, every other one with half a hello; who is hung
    up on comes again. How often one was."""
    over, hung_up = threading.Event(), [0]

    def crowd() -> None:
        made: dict[int, socket.socket] = {}
        while not over.is_set():
            while len(made) < count:
                sock = socket.socket()
                sock.setblocking(False)  # else a full queue at the port holds all of them up
                sock.bind((source, 0))
                if sock.connect_ex(address) not in (0, errno.EINPROGRESS):
                    sock.close()
                    break
                if len(made) % 2:
                    with suppress(OSError):
                        sock.send(MAGIC + b"\1")
                made[sock.fileno()] = sock
            for sock in select.select(list(made.values()), [], [], 0.005)[0]:
                with suppress(OSError):
                    if sock.recv(100):
                        continue
                hung_up[0] += 1
                made.pop(sock.fileno()).close()
        for sock in made.values():
            sock.close()

    thread = threading.Thread(target=crowd, daemon=True)
    thread.start()
    try:
        yield hung_up
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("count", "source"), [(64, "127.0.0.11"), (300, "127.0.0.11"), (128, "127.0.0.99")]
)
def test_nodes_meet_and_copies_go_on(job: Job, count: int, source: str) -> None:
    """Strangers are at the port which the first node dials (of two, the one with the lower number
    does), from its own address or another one: as the nodes meet, and before its next keeper
    dials."""
    first = job.start()
    first.wait_for("nodes-awaited")
    second = job.start()
    listens = second.wait_for("keeper-listens").data
    with strangers((listens["host"], listens["port"]), source, count) as hung_up:
        job.hold()
        os.kill(first.wait_for("keeper-started").data["pid"], signal.SIGKILL)
        first.wait_for("mesh", 2)
        memory = job_dir_of(second.arena_dir, "t")
        until(
            lambda: (read_node_safety(MEMORY, memory) or {}).get("expendable") == [0, 1],
            "that each node's copies are with the other one again",
        )
        job.end()
        assert count == 64 or hung_up[0] > 0
    for node in job.nodes:
        assert len(node.events("attempt-formed")) == 1 and not node.events("ranks-restarted")
        assert not node.events("node-lost")


@pytest.mark.parametrize("count", [64, 300])
def test_who_takes_every_place_and_stays_keeps_nobody_out(
    count: int, town: Town, stack: ExitStack
) -> None:
    """None of them gives its place up by itself while this lasts: keepers that are as patient as
    the test cannot wait until they do."""
    ears = Ear(), Ear()
    one, two = (
        town.keeper(node, ear, timeouts=PATIENT, tcp=TcpOptions(handshake_s=4 * LIMIT_S))
        for node, ear in enumerate(ears)
    )
    for number in range(count):  # they are let in in this order, and who dials below comes last
        stranger = stack.enter_context(socket.create_connection(two.address))
        with suppress(OSError):
            stranger.send((MAGIC + b"\1") * (number % 2))
    link(one, two)
    for ear in ears:
        ear.hears("up")
    assert one.send(1, RanksEnded(1)) and ears[1].messages.get(timeout=LIMIT_S) == RanksEnded(1)


def test_strangers_who_guess_at_the_knock_cost_no_handshake_and_are_told_of_once(job: Job) -> None:
    """Some say again what was said on another connection, some guess, some come too late; from two
    addresses."""
    first = job.start()
    first.wait_for("nodes-awaited")
    second = job.start()
    listens = second.wait_for("keeper-listens").data
    job.hold()
    threads = Path(f"/proc/{second.wait_for('keeper-started').data['pid']}/task")
    before = len(list(threads.iterdir()))
    address, right = (listens["host"], listens["port"]), Knocker(knock_key(SECRET.encode()))
    with ExitStack() as late:
        for number in range(40):
            come = socket.create_connection(address, LIMIT_S, (f"127.0.0.{91 + number % 2}", 0))
            late.enter_context(come)
            challenge = come.recv(26, socket.MSG_WAITALL)
            if number == 0:
                answer = right.receive(challenge)
            elif number < 20:
                assert isinstance(answer, bytes)
                come.sendall(right.opening + (answer if number % 3 else os.urandom(16)))
                assert come.recv(84, socket.MSG_WAITALL) == refusal_record(Refusal.WRONG_SECRET)
        assert len(list(threads.iterdir())) <= before + 1, "a thread for a stranger"
        until(lambda: len(second.events("stranger-refused")) >= 2, "both addresses")
    job.end()
    told = [event.data["source"] for event in second.events("stranger-refused")]
    assert sorted(told) == ["127.0.0.91", "127.0.0.92"]


def metrics(port: int) -> bytes:
    """Empty where the reader was pushed out before it could ask: it asks again."""
    with (
        suppress(OSError, HTTPException),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer,
    ):
        return bytes(answer.read())
    return b""


def test_the_metrics_answer(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job.start("--metrics-port", str(port))
    job.start()
    job.hold()
    with strangers(("127.0.0.1", port), "127.0.0.1", 64) as hung_up:
        for _ in range(5):
            until(lambda: b"keepstep_rank_up" in metrics(port), "an answer with metrics")
    assert hung_up[0] > 0
    job.end()
