"""Labs: nodes that are there, as fast as they may be, lost without a word, replaced, and gone
afterwards whatever happens."""

from __future__ import annotations

import io
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from keepstep.errors import ConfigError
from keepstep.testing.lab import Lab, living, mark_of, numbers, owner_of
from keepstep.testing.lab_messages import KillNode, ListNodes
from keepstep.testing.network import Loopback, remains, why_no_namespaces
from keepstep.testing.rehearsal import Rehearsal, ask

pytestmark = pytest.mark.timeout(120)
WITHIN_S = 20.0
RATE_BITS_PER_S = 100_000_000
SENT_BYTES = 6_000_000

SERVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
connection.sendall(b"hello")
got = 0
while data := connection.recv(1 << 20):
    got += len(data)
connection.sendall(str(got).encode())
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
connection.recv(5)
began = time.monotonic()
connection.sendall(bytes(int(sys.argv[3])))
connection.shutdown(socket.SHUT_WR)
got = int(connection.recv(100))
print(got, time.monotonic() - began)
"""


@pytest.fixture(params=["namespaces", "loopback"])
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    if request.param == "namespaces" and (why_not := why_no_namespaces()):
        pytest.skip(why_not)
    with Lab(2, tmp_path, namespaces=request.param == "namespaces") as lab:
        yield lab


def serve(lab: Lab, node: int) -> tuple[subprocess.Popen[bytes], int]:
    child = lab.start(
        node, [sys.executable, "-c", SERVE, lab.seats[node].address], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def traces(lab: Lab) -> list[object]:
    marked = [pid for pid in living() if mark_of(pid).startswith(f"{lab.number}/")]
    return [
        *marked,
        *remains().get(lab.number, []),
        *([lab.directory] if lab.directory.exists() else []),
    ]


@pytest.mark.everyday
def test_nodes_reach_each_other_and_the_lab(lab: Lab) -> None:
    from_lab = socket.create_server((lab.network.host, 0))
    server, port = serve(lab, 0)
    sender = lab.start(
        1, [sys.executable, "-c", SEND, lab.seats[0].address, port, 1000], stdout=subprocess.PIPE
    )
    assert sender.communicate(timeout=WITHIN_S)[0].split()[0] == b"1000"
    assert server.wait(WITHIN_S) == 0
    greet = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)"
    assert (
        lab.start(
            1, [sys.executable, "-c", greet, lab.network.host, from_lab.getsockname()[1]]
        ).wait(WITHIN_S)
        == 0
    )
    from_lab.close()
    assert lab.arena_dir(0) != lab.arena_dir(1) and lab.state_dir(0).is_dir()


def test_a_lost_node_leaves_nothing_and_is_replaced(lab: Lab) -> None:
    (lab.arena_dir(1) / "slot").write_bytes(b"state")
    parent = lab.start(1, ["sh", "-c", "setsid sleep 1000 & sleep 1000"])
    other = lab.start(0, ["sleep", "1000"])
    until = time.monotonic() + WITHIN_S
    # one that is becoming another program is not seen for a moment
    while len(there := lab.pids(1)) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    address = lab.seats[1].address
    assert sorted(lab.kill(1)) == there and len(there) == 3
    assert parent.wait(WITHIN_S) == -signal.SIGKILL and other.poll() is None
    assert not set(there) & set(living()) and lab.pids(1) == [] and not lab.arena_dir(1).exists()
    lab.replace(1)
    assert list(lab.arena_dir(1).iterdir()) == [] and lab.seats[1].address != address
    assert lab.start(1, ["true"]).wait(WITHIN_S) == 0


def test_all_is_removed_when_the_lab_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Lab(2, tmp_path) as lab:
        child = lab.start(0, ["sleep", "1000"])
        _ = 1 / 0
    assert child.wait(WITHIN_S) == -signal.SIGKILL
    assert traces(lab) == [] and lab.number not in numbers()


ALONE = """
import sys, time
from pathlib import Path
from keepstep.testing.lab import Lab
with Lab(2, Path(sys.argv[1])) as lab:
    lab.start(0, ["sleep", "1000"])
    print(lab.number, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_lab_that_is_ended(tmp_path: Path, signum: signal.Signals) -> None:
    """By a signal it can hear it removes everything itself; what a killed one leaves, the next one
    removes."""
    with subprocess.Popen(
        [sys.executable, "-c", ALONE, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as ended:
        assert ended.stdout is not None
        number = int(ended.stdout.readline())
        assert owner_of(number) == ended.pid
        ended.send_signal(signum)
    if signum is signal.SIGKILL:
        assert number in numbers() and owner_of(number) is None
        with Lab(1, tmp_path, namespaces=False):
            pass
    assert number not in numbers() and number not in remains()
    assert not [pid for pid in living() if mark_of(pid).startswith(f"{number}/")]


def test_labs_live_side_by_side(tmp_path: Path) -> None:
    with Lab(1, tmp_path) as one, Lab(1, tmp_path) as other:
        assert one.number != other.number and owner_of(one.number) == os.getpid()
        child = other.start(0, ["sleep", "1000"])
        one.kill(0)
        assert child.poll() is None and other.pids(0) == [child.pid]


@pytest.mark.everyday
def test_loopback_can_neither_be_shaped_nor_cut(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"expected network namespaces to shape links, found: namespaces=False"
    ):
        Lab(1, tmp_path, rate_bits_per_s=RATE_BITS_PER_S, namespaces=False).__enter__()
    with (
        Lab(1, tmp_path, namespaces=False) as lab,
        pytest.raises(ConfigError, match="to set the link of node 0"),
    ):
        lab.link_down(0)
    assert isinstance(lab.network, Loopback)


def listed(number: int) -> list[dict[str, Any]]:
    return [asdict(node) for node in ask(number, ListNodes()).nodes]


def test_a_node_is_lost_by_a_word_and_comes_back(lab: Lab) -> None:
    """The words of `keepstep lab kill` and `keepstep lab list`, and each node's output behind its
    name."""
    over = lab.room / "over"
    script = 'echo began as $KEEPSTEP_LAB; while [ ! -e "$0" ]; do sleep 0.05; done'
    out = io.StringIO()
    rehearsal = Rehearsal(
        lab, lambda node: ["sh", "-c", script, str(over)], dict(os.environ), 0.1, out
    )
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(rehearsal.run)

        def wait_for(lines: int) -> None:
            until = time.monotonic() + WITHIN_S
            while out.getvalue().count("began") < lines:
                assert time.monotonic() < until and not ended.done(), out.getvalue()
                time.sleep(0.01)

        try:
            wait_for(2)
            first = listed(lab.number)
            assert "node 1 is lost with" in ask(lab.number, KillNode(1)).why
            wait_for(3)
            second = listed(lab.number)
            with pytest.raises(ConfigError, match="expected a node below 2"):
                ask(lab.number, KillNode(2))
        finally:
            over.touch()
        assert ended.result(WITHIN_S) == 0
    assert (
        first[0]["address"] == second[0]["address"] and first[1]["address"] != second[1]["address"]
    )
    assert out.getvalue().count(f"[node 1] began as {lab.number}/1") == 2
    with pytest.raises(ConfigError, match=f"expected a lab {lab.number} that listens"):
        ask(lab.number, ListNodes())


# -- only with namespaces


@pytest.fixture
def shaped(tmp_path: Path) -> Iterator[Lab]:
    if why_not := why_no_namespaces():
        pytest.skip(why_not)
    with Lab(2, tmp_path, RATE_BITS_PER_S) as lab:
        yield lab


def test_links_are_no_faster_than_their_rate(shaped: Lab) -> None:
    server, port = serve(shaped, 0)
    sender = shaped.start(
        1,
        [sys.executable, "-c", SEND, shaped.seats[0].address, port, SENT_BYTES],
        stdout=subprocess.PIPE,
    )
    got, took_s = sender.communicate(timeout=60)[0].split()
    assert int(got) == SENT_BYTES and server.wait(WITHIN_S) == 0
    assert SENT_BYTES * 8 / float(took_s) < 1.15 * RATE_BITS_PER_S  # the first burst is free


def test_a_lost_node_says_no_word_to_its_peers(shaped: Lab) -> None:
    _, port = serve(shaped, 1)
    with socket.create_connection((shaped.seats[1].address, port), WITHIN_S) as connection:
        assert connection.recv(5) == b"hello"
        shaped.kill(1)
        shaped.replace(1)
        assert select.select([connection], [], [], 1.0)[0] == []


def test_a_link_that_flaps(shaped: Lab) -> None:
    server, port = serve(shaped, 1)
    with socket.create_connection((shaped.seats[1].address, port), WITHIN_S) as connection:
        assert connection.recv(5) == b"hello"
        shaped.link_down(1)
        connection.sendall(b"x")
        connection.shutdown(socket.SHUT_WR)
        assert select.select([connection], [], [], 0.5)[0] == [] and server.poll() is None
        shaped.link_up(1)
        connection.settimeout(60)
        assert connection.recv(5) == b"1"
