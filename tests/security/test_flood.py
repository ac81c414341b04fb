"""A flood of strangers at a keeper's port, and at the metrics': connections that say nothing, and
hellos that end in the middle."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException

import pytest

from keepstep.config import job_dir_of
from keepstep.core.wire.connection import MAGIC
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import read_node_safety
from tests.processes.test_run_nodes import until
from tests.security.two_nodes import Job, job, machines

__all__ = ["job", "machines"]  # fixtures
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
                sock.bind((source, 0))
                try:
                    sock.connect(address)
                    if len(made) % 2:
                        sock.send(MAGIC + b"\1")
                except OSError:
                    sock.close()
                    break
                made[sock.fileno()] = sock
            for sock in select.select(list(made.values()), [], [], 0.01)[0]:
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


@pytest.mark.parametrize("count", [64, 300])
def test_nodes_meet_and_copies_go_on(job: Job, count: int) -> None:
    """Strangers come from the other node's own address, before it does, and before its next keeper
    does."""
    first = job.start()
    listens = first.wait_for("keeper-listens").data
    with strangers((listens["host"], listens["port"]), "127.0.0.12", count) as hung_up:
        second = job.start()
        job.hold()
        os.kill(second.wait_for("keeper-started").data["pid"], signal.SIGKILL)
        second.wait_for("mesh", 2)
        memory = job_dir_of(first.arena_dir, "t")
        until(
            lambda: (read_node_safety(MEMORY, memory) or {}).get("expendable") == [0, 1],
            "that each node's copies are with the other one again",
        )
        job.end()
        assert count == 64 or hung_up[0] > 0
    for node in job.nodes:
        assert len(node.events("attempt-formed")) == 1 and not node.events("ranks-restarted")


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
