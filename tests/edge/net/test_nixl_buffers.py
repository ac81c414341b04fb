"""Blocks by NIXL, over UCX's TCP on loopback. The oracle is byte equality: whatever becomes of
registered memory, of the process that has it and of what is said beside it, blocks arrive as they
were sent or not at all."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.core.wire.delivery import MAX_TRIES
from keepstep.core.wire.streams import StreamLimits
from keepstep.edge.net.nixl_buffers import NixlBuffers, nixl_environ
from keepstep.edge.net.tcp_links import TcpLinks
from keepstep.errors import KeeperError
from keepstep.model.buffers import BUFFERS, BufferRecord, RecordKind
from keepstep.model.units import MIB, S_NS
from keepstep.runtime.keeper.open_links import open_tcp_links
from tests.contracts.test_links import JOB, SECRET, Ear, send_all
from tests.edge.net.nixl import needs_nixl
from tests.edge.proxy import Proxy

pytestmark = needs_nixl
LIMIT_S = 60.0
HERE = ("127.0.0.1", 0)
BY_NIXL = "block bytes received by NIXL"


def until(holds: Callable[[], bool]) -> None:
    ends, tick = time.monotonic() + LIMIT_S, threading.Event()
    while not holds():
        assert time.monotonic() < ends, "it does not come about"
        tick.wait(0.01)


class Pair:
    """Keepers 1 and 2, of which the first dials, through a proxy."""

    def __init__(
        self,
        transports: tuple[str, str],
        nbytes: int,
        block_mac: str,
        encrypt: bool,
    ) -> None:
        self.ear = Ear(nbytes)
        self.links: list[TcpLinks] = []
        for transport, ear in zip(transports, (Ear(), self.ear), strict=True):
            made = open_tcp_links(
                JOB,
                1,
                HERE,
                3 * S_NS,
                ear,
                block_mac=block_mac,
                streams=StreamLimits.of(1),
                transport=transport,
            )
            self.links.append(made)
        one, two = self.links
        self.proxy = Proxy(two.address)
        one.be(1, SECRET, encrypt)
        two.be(2, SECRET, encrypt)
        one.connect(2, self.proxy.address)
        two.connect(1, one.address)
        until(lambda: one.is_open(2) and two.is_open(1))

    def buffers(self, at: int) -> NixlBuffers:
        found = self.links[at]._buffers
        assert found is not None
        return found

    def send(self, data: bytes, count: int) -> list[str | None]:
        """What became of so many blocks, in the end."""
        done = send_all(self.links[0], 2, data, count)
        until(lambda: len(done) == count)
        return done

    @property
    def nbytes_by_nixl(self) -> int:
        return self.links[1].counts().get(BY_NIXL, 0)

    def close(self) -> None:
        for links in self.links:
            links.close()
        self.proxy.close()


Open = Callable[..., Pair]


@pytest.fixture
def pair() -> Iterator[Open]:
    made: list[Pair] = []

    def open_pair(
        one: str = "nixl",
        two: str = "nixl",
        nbytes: int = 16 * MIB,
        block_mac: str = "on",
        encrypt: bool = False,
    ) -> Pair:
        made.append(Pair((one, two), nbytes, block_mac, encrypt))
        return made[-1]

    yield open_pair
    for each in made:
        each.close()


def some(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def warmed(pair: Pair) -> Pair:
    """The other side reads already."""
    until(lambda: pair.send(some(2 * MIB), 1) == [None] and pair.nbytes_by_nixl > 0)
    return pair


@pytest.mark.parametrize("encrypt", [False, True])
def test_blocks_cross_by_nixl_and_nothing_else_does(pair: Open, encrypt: bool) -> None:
    both = warmed(pair(encrypt=encrypt))
    before = both.nbytes_by_nixl
    seen = 0

    def look(piece: bytes) -> bytes:
        nonlocal seen
        seen += len(piece)
        return piece

    both.proxy.alter = look
    data = some(16 * MIB)
    assert both.send(data, 8) == [None] * 8 and both.ear.memory == data
    assert both.nbytes_by_nixl - before == len(data), "all of them"
    assert seen < MIB // 4, "the socket carries what is said about them"
    assert len(both.buffers(0)._to_fill) == BUFFERS, "all are free again"


def test_a_stream_that_comes_later_disturbs_no_read() -> None:
    """NIXL takes what is read for failed when its agent is forgotten, though it may still come."""
    one, two = NixlBuffers("127.0.0.1"), NixlBuffers("127.0.0.1")
    data, found = some(1000), list[int | None]()
    buffer = one.take()
    assert buffer is not None
    one.fill(buffer, memoryview(data))
    record = BufferRecord(RecordKind.BUFFER, len(data), buffer)
    source = two.load(1, one.offer, LIMIT_S)
    assert source is not None
    one._process.send_signal(signal.SIGSTOP)
    reader = threading.Thread(
        target=lambda: found.append(two.read(source, record, LIMIT_S, lambda: False))
    )
    reader.start()
    until(lambda: len(two._to_read) < BUFFERS)
    later = two.load(1, one.offer, LIMIT_S)
    assert later is not None
    two.unload(later)
    two.unload(source)
    assert two.load(1, one.offer, LIMIT_S) is not None, "all of that is done"
    one._process.send_signal(signal.SIGCONT)
    reader.join()
    read = bytearray(len(data))
    assert found[0] is not None and two.look_at(found[0], 0, memoryview(read)) == len(data)
    assert read == data
    one.close()
    two.close()


@pytest.mark.parametrize(("one", "two"), [("nixl", "tcp"), ("tcp", "nixl")])
def test_who_has_none_is_spoken_to_over_tcp(pair: Open, one: str, two: str) -> None:
    both, data = pair(one, two), some(8 * MIB)
    assert both.send(data, 4) == [None] * 4 and both.ear.memory[: len(data)] == data
    assert both.nbytes_by_nixl == 0


@pytest.mark.parametrize(("block_mac", "encrypt"), [("off", False), ("on", False), ("on", True)])
def test_memory_that_arrives_wrong_is_refused(
    pair: Open, monkeypatch: pytest.MonkeyPatch, block_mac: str, encrypt: bool
) -> None:
    """As whoever can write to the buffers of either process might have it: one bit."""
    both = warmed(pair(block_mac=block_mac, encrypt=encrypt))
    blocks, fill = len(both.ear.blocks), both.buffers(0).fill

    def change(buffer: int, data: memoryview) -> None:
        changed = bytearray(data)
        changed[len(changed) // 2] ^= 4
        fill(buffer, memoryview(changed))

    monkeypatch.setattr(both.buffers(0), "fill", change)
    (why,) = both.send(some(4 * MIB), 1)
    assert why is not None and "damaged" in why
    assert len(both.ear.blocks) == blocks, "nobody is told of a block"
    assert both.links[1].damaged() == {1: MAX_TRIES}, "each try was found"
    monkeypatch.undo()
    data = some(8 * MIB)
    assert both.send(data, 2) == [None] * 2 and both.ear.memory[: len(data)] == data


def test_a_record_that_is_changed_on_the_way_ends_the_connection(pair: Open) -> None:
    """Nobody on the way can have a keeper read elsewhere. What was under way comes again."""
    both = warmed(pair())
    left = 1

    def change(piece: bytes) -> bytes:
        nonlocal left
        if left and len(piece) >= 40:
            left -= 1
            return piece[:20] + bytes([piece[20] ^ 1]) + piece[21:]  # of which buffer
        return piece

    both.proxy.alter = change
    data = some(16 * MIB)
    assert both.send(data, 8) == [None] * 8 and both.ear.memory == data
    assert refused(both, "damaged") >= 1


def test_a_process_that_dies_costs_nothing_but_time(pair: Open) -> None:
    for at in (0, 1):
        both, data = warmed(pair()), some(16 * MIB)
        done = send_all(both.links[0], 2, data, 16)
        both.buffers(at)._process.send_signal(signal.SIGKILL)
        until(lambda done=done: len(done) == 16)
        assert done == [None] * 16 and both.ear.memory == data
        after = both.nbytes_by_nixl
        assert both.send(data, 4) == [None] * 4 and both.nbytes_by_nixl == after, "over TCP now"


def test_a_read_that_does_not_end_keeps_its_buffer_until_it_does(pair: Open) -> None:
    """The other side's process stands still, so over UCX's TCP nobody answers the read."""
    both, data = warmed(pair()), some(8 * MIB)
    stopped, reader = both.buffers(0)._process, both.buffers(1)
    stopped.send_signal(signal.SIGSTOP)
    try:
        assert both.send(data, 4) == [None] * 4 and both.ear.memory[: len(data)] == data
        assert reader.counts()["reads by NIXL failed"] >= 1, "it was given up, and sent over TCP"
        assert len(reader._to_read) < BUFFERS, "what may still be written is nobody else's"
    finally:
        stopped.send_signal(signal.SIGCONT)
    until(lambda: len(reader._to_read) == BUFFERS)
    assert both.ear.memory[: len(data)] == data, "what came late overwrote nothing"


def test_more_freed_than_was_out_or_read_than_was_offered_ends_the_connection(pair: Open) -> None:
    both = warmed(pair())
    for record in (BufferRecord(RecordKind.FREED, 3), BufferRecord(RecordKind.BUFFER, 10, 999)):
        carriers = both.links[1]._peers
        assert carriers is not None
        before = refused(both)
        say_on_blocks(both, record)
        until(lambda before=before: refused(both) > before)
    data = some(4 * MIB)
    assert both.send(data, 1) == [None] and both.ear.memory[: len(data)] == data


def refused(pair: Pair, why: str = "malformed") -> int:
    return sum(links.counts().get(f"refused {why}", 0) for links in pair.links)


def say_on_blocks(pair: Pair, record: BufferRecord) -> None:
    """As a peer of another release might, which knows the secret."""
    until(lambda: pair.links[0].is_open(2))
    peers = pair.links[0]._peers
    assert peers is not None
    link = peers._table._links[2]
    until(lambda: 1 in link._carried and link._carried[1]._stream is not None)
    carrier = link._carried[1]._transport
    carrier._queue(record)  # type: ignore[attr-defined]


def test_without_a_way_to_others_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir()):
        pytest.skip("this machine has a network card for RDMA")
    monkeypatch.delenv("UCX_TLS")
    with pytest.raises(KeeperError, match=r"^transport: expected NIXL .* RDMA.*UCX_TLS"):
        open_tcp_links(JOB, 1, HERE, 3 * S_NS, Ear(), transport="nixl")


def test_the_process_is_told_no_secret_and_dies_with_its_keeper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEEPSTEP_SECRET", "correct-horse-battery-staple")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    buffers = NixlBuffers("127.0.0.1")
    pid = buffers._process.pid
    told = Path(f"/proc/{pid}/environ").read_text()
    assert "KEEPSTEP" not in told and "AWS" not in told and "UCX_TLS=tcp" in told
    held = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    assert "/memfd:keepstep-buffers (deleted)" in held
    assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text(), "confined before it speaks"
    buffers.close()
    buffers.close()
    assert not Path(f"/proc/{pid}").exists()


CONFINED = """
import os
from keepstep.edge.net.nixl_process import confine
print(confine())
for act in (lambda: open("/proc/self/status"), lambda: open(f"/proc/{os.getppid()}/mem", "rb"),
            lambda: os.execv("/bin/true", ["true"]), lambda: os.unlink("/nowhere/at/all")):
    try:
        print("done", act())
    except OSError as error:
        print(type(error).__name__)
"""


def test_whoever_comes_to_rule_the_process_opens_nothing() -> None:
    """UCX lets whoever reaches it write to its process, so it has to be ruled by strangers: what it
    can do then is what it has open."""
    said = subprocess.run(
        [sys.executable, "-c", CONFINED], capture_output=True, text=True, check=True
    ).stdout.split()
    if said[0] == "False":
        pytest.skip("this kernel has no Landlock")
    assert said == ["True", *["PermissionError"] * 3, "FileNotFoundError"]


def test_rdma_alone_unless_somebody_says_otherwise_and_then_on_one_interface() -> None:
    assert nixl_environ({}, "10.0.0.1")["UCX_TLS"] == "ib"
    assert "UCX_NET_DEVICES" not in nixl_environ({}, "10.0.0.1")
    loopback = nixl_environ({"UCX_TLS": "tcp"}, "127.0.0.1")
    assert loopback["UCX_NET_DEVICES"] == "lo" and loopback["CUDA_VISIBLE_DEVICES"] == ""
    own = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth1"}
    assert nixl_environ(own, "127.0.0.1").items() >= own.items()
