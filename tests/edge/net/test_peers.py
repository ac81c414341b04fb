"""Two real ends on loopback, with a proxy between them that cuts, damages and swallows. The oracle
is byte equality.

Nothing sleeps: tests wait for what the handlers are told.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import queue
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.coding.checksum import checksum
from keepstep.core.wire.connection import MAGIC, VERSION, Connection, greeted, refusal_record
from keepstep.core.wire.delivery import MAX_TRIES
from keepstep.core.wire.health import LinkTimeouts
from keepstep.core.wire.knock import Knocker, knock_key
from keepstep.core.wire.streams import StreamLimits
from keepstep.core.wire.traffic import Gate, LinkOptions
from keepstep.edge.net import peers as peers_module
from keepstep.edge.net.peers import PeerOptions, Peers
from keepstep.edge.net.porch import knock_at
from keepstep.edge.net.tcp import Pacer, TcpOptions, dial, listen
from keepstep.model.messages.peers import MeshMessage, RanksEnded
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB, MIB, MS_NS
from keepstep.model.wire import Address, Dial, Flow, Identity, Part, Refusal, Refused, Span
from keepstep.runtime.keeper.open_links import HASHING, new_link_table, wire_format
from tests.edge.proxy import Proxy

JOB, SECRET = b"j" * 16, b"the job's secret, 32 bytes long."
QUICK = LinkTimeouts(
    ping_ns=100 * MS_NS,
    silence_ns=1000 * MS_NS,
    dead_ns=30_000 * MS_NS,
    retry_first_ns=20 * MS_NS,
    retry_max_ns=200 * MS_NS,
)
IMPATIENT = replace(QUICK, silence_ns=900 * MS_NS, dead_ns=1000 * MS_NS)
PATIENT = replace(QUICK, silence_ns=15_000 * MS_NS)
NOWHERE = ("127.0.0.1", 9)
STAMP = Stamp(17, 2)
LIMIT_S = 30.0


def span_of(data: bytes | memoryview, offset: int = 0, rank: int = 0) -> Span:
    return Span(rank, STAMP, Part.PAYLOAD, offset, len(data))


class Ear:
    """A receiver that keeps what it is told, and places blocks in `memory` at their offset."""

    def __init__(self, memory: memoryview | None = None) -> None:
        self.memory = memory
        self.told: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.messages: queue.Queue[MeshMessage] = queue.Queue()
        self.blocks: queue.Queue[tuple[Span, int]] = queue.Queue()
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()

    def up(self, node: int) -> None:
        self.told.put(("up", node))

    def message(self, node: int, message: MeshMessage) -> None:
        self.messages.put(message)

    def place(self, node: int, span: Span) -> memoryview | None:
        self.asked.set()
        assert self.gate.wait(LIMIT_S)
        return None if self.memory is None else self.memory[span.offset : span.offset + span.length]

    def block(self, node: int, span: Span, checksum: int) -> None:
        self.blocks.put((span, checksum))

    def writable(self, node: int) -> None:
        self.told.put(("writable", node))

    def dead(self, node: int, why: str, is_loss: bool) -> None:
        self.told.put(("dead" if is_loss else "left", node, why))

    def hears(self, what: str) -> tuple[Any, ...]:
        """The next thing told, which must be this."""
        told = self.told.get(timeout=LIMIT_S)
        assert told[0] == what, told
        return told


class Town:
    """Builds keepers and takes them down again."""

    def __init__(self) -> None:
        self._open: list[Peers | Proxy] = []

    def keeper(
        self,
        node: int,
        ear: Ear,
        *,
        incarnation: int = 1,
        secret: bytes = SECRET,
        job: bytes = JOB,
        streams: int = 1,
        timeouts: LinkTimeouts = QUICK,
        messages: int = 1000,
        queue_bytes: int = 64 * MIB,
        gate: Gate | None = None,
        **options: Any,
    ) -> Peers:
        me = Identity(job, node, incarnation)
        of_links = LinkOptions(
            hashing=HASHING,
            timeouts=timeouts,
            streams=StreamLimits(streams, streams),
            max_messages=messages,
            queue_bytes=queue_bytes,
            gate=gate,
            format=wire_format("on"),
        )
        peers = Peers(
            lambda shell: new_link_table(me, secret, ear, shell, of_links), PeerOptions(**options)
        )
        self._open.append(peers)
        return peers

    def proxy(self, target: Address) -> Proxy:
        proxy = Proxy(target)
        self._open.append(proxy)
        return proxy

    def close(self) -> None:
        for it in reversed(self._open):
            it.close()


@pytest.fixture
def town() -> Iterator[Town]:
    town = Town()
    yield town
    town.close()


def link(one: Peers, two: Peers, through: Address | None = None) -> None:
    """`one` dials `two`; both wait until they are up."""
    two.connect(one.me.node, one.address)
    one.connect(two.me.node, through or two.address)


def linked(
    town: Town, ear_one: Ear, ear_two: Ear, proxied: bool = False, **both: Any
) -> tuple[Peers, Peers, Proxy | None]:
    one, two = town.keeper(1, ear_one, **both), town.keeper(2, ear_two, **both)
    proxy = town.proxy(two.address) if proxied else None
    link(one, two, proxy.address if proxy else None)
    assert ear_one.hears("up") == ("up", two.me.node) and ear_two.hears("up") == ("up", one.me.node)
    return one, two, proxy


def note(number: int) -> MeshMessage:
    return RanksEnded(number)


def eventually(holds: Callable[[], bool]) -> None:
    until, tick = time.monotonic() + LIMIT_S, threading.Event()
    while not holds():
        assert time.monotonic() < until
        tick.wait(0.01)


GREETING = greeted(b"")
HELLO_AGAIN = GREETING + b"\1\7\0\0"  # of the dialer, resuming, with MACs for blocks, channel 0


def is_redial(piece: bytes) -> bool:
    """The first that a dialer says."""
    return piece == GREETING


def send_all(
    peers: Peers, node: int, data: memoryview, block_bytes: int, ear: Ear
) -> queue.Queue[str | None]:
    """All of it in blocks, waiting for room when there is none. What each block's `done` was
    told."""
    done: queue.Queue[str | None] = queue.Queue()
    for at in range(0, len(data), block_bytes):
        piece = data[at : at + block_bytes]
        while not peers.send_block(node, span_of(piece, at), piece, done.put):
            ear.hears("writable")
    return done


def all_done(done: queue.Queue[str | None], count: int) -> None:
    assert [done.get(timeout=LIMIT_S) for _ in range(count)] == [None] * count


# what crosses


def test_messages_both_ways_in_order(town: Town) -> None:
    ears = Ear(), Ear()
    one, two, _ = linked(town, *ears)
    for number in range(200):
        assert one.send(2, note(number)) and two.send(1, note(1000 + number))
    assert [ears[1].messages.get(timeout=LIMIT_S) for _ in range(200)] == [
        note(n) for n in range(200)
    ]
    assert [ears[0].messages.get(timeout=LIMIT_S) for _ in range(200)] == [
        note(1000 + n) for n in range(200)
    ]


def test_what_was_said_before_the_link_is_up_arrives(town: Town) -> None:
    ears = Ear(), Ear()
    one, two = town.keeper(1, ears[0]), town.keeper(2, ears[1])
    one.connect(2, two.address)
    assert one.send(2, note(1))
    two.connect(1, one.address)
    assert ears[1].messages.get(timeout=LIMIT_S) == note(1)


@pytest.mark.parametrize("streams", [1, 3])
def test_blocks_from_map_to_map_both_ways(town: Town, tmp_path: Path, streams: int) -> None:
    """Each with the checksum of its bytes, whether the sender knew it or not; the last one
    short."""
    data = random.Random(streams).randbytes(6 * MIB + 12_345)
    maps = []
    for name in ("one", "two", "from-one", "from-two"):
        path = tmp_path / name
        path.write_bytes(data if "from" not in name else bytes(len(data)))
        with open(path, "r+b") as file:
            maps.append(mmap.mmap(file.fileno(), 0))
    views = [memoryview(m) for m in maps]
    ears = Ear(views[3]), Ear(views[2])
    one, two, _ = linked(town, *ears, streams=streams)
    forth = send_all(one, 2, views[0], 1 * MIB, ears[0])
    back: queue.Queue[str | None] = queue.Queue()
    assert two.send_block(1, span_of(data), views[1], back.put, checksum(data))
    all_done(forth, 7)
    all_done(back, 1)
    assert maps[2][:] == data and maps[3][:] == data
    told = sorted(
        (ears[1].blocks.get(timeout=LIMIT_S) for _ in range(7)), key=lambda block: block[0].offset
    )
    assert told == [
        (span_of(views[0][at : at + MIB], at), checksum(views[0][at : at + MIB]))
        for at in range(0, len(data), MIB)
    ]
    assert ears[0].blocks.get(timeout=LIMIT_S) == (span_of(data), checksum(data))


def test_a_block_nobody_wants_is_refused_and_the_next_one_arrives(town: Town) -> None:
    ears = Ear(), Ear()
    one, _, _ = linked(town, *ears)
    data, done = memoryview(bytes(range(256)) * 4096), queue.Queue[str | None]()
    assert one.send_block(2, span_of(data), data, done.put)
    assert done.get(timeout=LIMIT_S) == "the other side does not want it"
    ears[1].memory = memoryview(bytearray(len(data)))
    assert one.send_block(2, span_of(data), data, done.put)
    all_done(done, 1)
    assert ears[1].memory == data and ears[1].blocks.qsize() == 1


def test_bytes_of_blocks_are_counted_at_both_ends_and_nothing_else_is(town: Town) -> None:
    """Whether they were wanted or not: where a count stays, no byte of a block crossed."""
    data, done = memoryview(random.Random(6).randbytes(MIB)), queue.Queue[str | None]()
    ears = Ear(), Ear()
    one, two, _ = linked(town, *ears)

    def counted() -> list[int]:
        return [
            peers.counts().get(f"block bytes {way}", 0)
            for peers in (one, two)
            for way in ("sent", "received")
        ]

    assert one.send(2, note(1)) and ears[1].messages.get(timeout=LIMIT_S)
    assert counted() == [0, 0, 0, 0]
    assert (
        one.send_block(2, span_of(data), data, done.put) and done.get(timeout=LIMIT_S) is not None
    )
    assert counted() == [MIB, 0, 0, MIB]
    ears[0].memory = memoryview(bytearray(MIB))
    assert (
        two.send_block(1, span_of(data[:1000]), data[:1000], done.put)
        and done.get(timeout=LIMIT_S) is None
    )
    assert counted() == [MIB, 1000, 1000, MIB]


# back-pressure


def test_a_full_queue_is_a_fact_and_so_is_its_end(town: Town) -> None:
    data = memoryview(random.Random(1).randbytes(256 * KIB))
    ears = Ear(), Ear(memoryview(bytearray(len(data))))
    one, _, _ = linked(
        town, *ears, queue_bytes=4 * len(data), tcp=TcpOptions(buffer_bytes=64 * KIB)
    )
    ears[1].gate.clear()  # the receiver stands still: kernel, window and queue fill
    done, taken = queue.Queue[str | None](), 0
    while one.send_block(2, span_of(data), data, done.put):
        taken += 1
        assert taken < 100, "an unbounded queue"
    assert taken >= 4 and one.counts()["would block"] == 1
    ears[1].gate.set()
    assert ears[0].hears("writable") == ("writable", 2)
    all_done(done, taken)
    assert ears[0].told.empty()


def test_unconfirmed_messages_are_bounded(town: Town) -> None:
    ear = Ear()
    one = town.keeper(1, ear, messages=10)
    one.connect(2, NOWHERE)
    assert [one.send(2, note(n)) for n in range(11)] == [True] * 10 + [False]
    assert not one.send(3, note(1)), "there is no link with node 3"
    with pytest.raises(ValueError, match="ended: mesh_version"):
        one.send(2, RanksEnded(-1))


def test_a_pacer_keeps_its_rate(town: Town) -> None:
    """8 MiB/s for 2 MiB over two streams together, less the burst: it cannot take less than 0.2
    s."""
    data = memoryview(random.Random(2).randbytes(2 * MIB))
    ears = Ear(), Ear(memoryview(bytearray(len(data))))
    one, _, _ = linked(town, *ears, streams=2, pacer=Pacer(8 * MIB, burst_bytes=256 * KIB))
    began = time.monotonic()
    all_done(send_all(one, 2, data, 256 * KIB, ears[0]), 8)
    assert 0.2 < time.monotonic() - began < 5.0
    assert ears[1].memory == data


def test_packets_of_copies_have_a_class_of_their_own_and_those_of_messages_have_not(
    town: Town,
) -> None:
    data = memoryview(random.Random(2).randbytes(256 * KIB))
    ears = Ear(), Ear(memoryview(bytearray(len(data))))
    one, two, _ = linked(town, *ears, tcp=TcpOptions(copy_dscp=1))
    all_done(send_all(one, 2, data, 64 * KIB, ears[0]), 4)

    def classes(peers: Peers) -> list[int]:
        """Of what was made to it, as the kernel has it."""
        found = [
            each.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)
            for each in gc.get_objects()
            if isinstance(each, socket.socket)
            and each.fileno() >= 0
            and each.getsockname() == peers.address
            and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ]
        return sorted(found)

    both = classes(one) + classes(two)
    assert sorted(both) == [0, 4, 4], "one connection for messages, one each way for copies"


def test_the_kernel_is_told_priority_and_pacing() -> None:
    sock = listen(("127.0.0.1", 0), TcpOptions(priority=3, max_pacing_bytes_per_s=1_000_000))
    with contextlib.closing(sock):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 3
        assert sock.getsockopt(socket.SOL_SOCKET, 47) == 1_000_000
        with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1"):
            listen(sock.getsockname(), TcpOptions())


# links that flap


def test_a_connection_cut_in_the_middle_of_a_block_loses_nothing(town: Town) -> None:
    """Again and again, each time after another number of bytes: every block arrives, once, with its
    bytes."""
    rng = random.Random(3)
    data = memoryview(rng.randbytes(8 * MIB))
    ears = Ear(), Ear(memoryview(bytearray(len(data))))
    one, _, proxy = linked(town, *ears, proxied=True)
    assert proxy is not None
    budget, cuts = rng.randrange(1 * MIB), 0

    def cutting(piece: bytes) -> bytes | None:
        nonlocal budget, cuts
        budget -= len(piece)
        if budget > 0 or cuts == 12:
            return piece
        budget, cuts = rng.randrange(1 * MIB), cuts + 1
        return None

    proxy.alter = cutting
    all_done(send_all(one, 2, data, 512 * KIB, ears[0]), 16)
    assert cuts == 12 and ears[1].memory == data
    spans = [ears[1].blocks.get_nowait()[0].offset for _ in range(16)]
    assert sorted(spans) == list(range(0, len(data), 512 * KIB)) and ears[1].blocks.empty()
    assert one.counts()["blocks sent again"] > 0
    assert ears[0].told.empty(), "a link that flaps is waited out"


def test_messages_arrive_once_and_in_order_however_often_the_link_flaps(town: Town) -> None:
    rng = random.Random(4)
    ears = Ear(), Ear()
    one, two, proxy = linked(town, *ears, proxied=True)
    assert proxy is not None
    pieces = 0

    def cutting(piece: bytes) -> bytes | None:
        nonlocal pieces
        pieces += 1
        return None if pieces < 300 and rng.random() < 0.1 else piece

    proxy.alter = cutting
    heard: list[MeshMessage] = []
    for number in range(60):
        assert one.send(2, note(number)) and two.send(1, note(number))
        heard.append(ears[1].messages.get(timeout=LIMIT_S))
    assert heard == [note(n) for n in range(60)]
    assert [ears[0].messages.get(timeout=LIMIT_S) for _ in range(60)] == heard
    assert ears[1].messages.empty() and ears[0].messages.empty()
    assert one.counts()["connections lost"] > 3


@pytest.mark.parametrize("first", ["who dials", "who is dialled"])
def test_a_link_that_swallows_everything_is_cut_and_made_again(town: Town, first: str) -> None:
    """No socket notices: one end hears nothing and cuts, which breaks the other end's connection.
    Either may be the first."""
    quick, slow = replace(PATIENT, silence_ns=500 * MS_NS), PATIENT
    ears, tcp = (Ear(), Ear()), TcpOptions(handshake_s=0.5)
    one = town.keeper(1, ears[0], timeouts=quick if first == "who dials" else slow, tcp=tcp)
    two = town.keeper(2, ears[1], timeouts=slow if first == "who dials" else quick, tcp=tcp)
    proxy = town.proxy(two.address)
    link(one, two, proxy.address)
    assert ears[0].hears("up") and ears[1].hears("up")
    swallowed, redialled = threading.Event(), threading.Event()

    def hole(piece: bytes) -> bytes:
        (redialled if is_redial(piece) else swallowed).set()
        return b""

    proxy.alter = hole
    assert one.send(2, note(1)) and swallowed.wait(LIMIT_S)
    eventually(lambda: any(peers.counts().get("silences", 0) for peers in (one, two)))
    assert redialled.wait(LIMIT_S), "it is not dialled again"
    assert ears[1].messages.empty()
    proxy.alter = lambda piece: piece
    assert ears[1].messages.get(timeout=LIMIT_S) == note(1)
    silences = [peers.counts().get("silences", 0) for peers in (one, two)]
    assert silences == ([1, 0] if first == "who dials" else [0, 1])
    assert ears[0].told.empty() and ears[1].told.empty()


def test_a_hello_damaged_on_its_way_does_not_end_the_link(town: Town) -> None:
    """It names a link nobody knows, and is refused as forgotten. The next one is whole."""
    ears = Ear(), Ear()
    one, two, proxy = linked(town, *ears, proxied=True)
    assert proxy is not None
    hellos = 0

    def harming(piece: bytes) -> bytes | None:
        nonlocal hellos
        at = piece.find(HELLO_AGAIN)  # perhaps in one with the knock
        if at >= 0:
            hellos, at = hellos + 1, at + 14
            return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :] if hellos < 3 else piece
        return piece

    proxy.alter = harming
    proxy.hang_up()
    assert one.send(2, note(1)) and ears[1].messages.get(timeout=LIMIT_S) == note(1)
    assert two.counts()["refused forgotten"] == 2 and ears[0].told.empty()


# damage


def test_bits_flipped_on_the_wire_are_found_and_what_they_hit_comes_again(town: Town) -> None:
    """In blocks, in heads, in messages, in handshakes: nothing wrong is told, everything right
    arrives."""
    rng = random.Random(5)
    data = memoryview(rng.randbytes(24 * MIB))
    ears = Ear(memoryview(bytearray(0))), Ear(memoryview(bytearray(len(data))))
    one, two, proxy = linked(town, *ears, proxied=True, streams=2)
    assert proxy is not None
    flips = 0

    def flipping(piece: bytes) -> bytes:
        nonlocal flips
        if rng.random() > 0.08 or flips >= 200:
            return piece
        flips += 1
        out = bytearray(piece)
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        return bytes(out)

    proxy.alter = flipping
    done = send_all(one, 2, data, 128 * KIB, ears[0])
    for number in range(50):
        assert one.send(2, note(number))
    results = [done.get(timeout=LIMIT_S) for _ in range(192)]
    assert [ears[1].messages.get(timeout=LIMIT_S) for _ in range(50)] == [
        note(n) for n in range(50)
    ]
    counts = two.counts()
    assert flips > 20 and counts["blocks damaged"] > 5
    assert results.count(None) == ears[1].blocks.qsize()
    for _ in range(results.count(None)):
        span, found = ears[1].blocks.get_nowait()
        assert (
            checksum(ears[1].memory[span.offset : span.offset + span.length])  # type: ignore[index]
            == found
            == checksum(data[span.offset :][: span.length])
        )
    assert (
        set(results)
        <= {None, "it arrived damaged every time: by the network, or its source changes"}
        and results.count(None) >= 185
    )


def test_a_source_that_is_not_what_its_checksum_says_is_given_up(town: Town) -> None:
    data = memoryview(bytes(1000))
    ears = Ear(), Ear(memoryview(bytearray(1000)))
    one, two, _ = linked(town, *ears)
    done: queue.Queue[str | None] = queue.Queue()
    assert one.send_block(2, span_of(data), data, done.put, checksum(b"something else"))
    assert (
        done.get(timeout=LIMIT_S)
        == "it arrived damaged every time: by the network, or its source changes"
    )
    assert ears[1].blocks.empty() and two.counts()["blocks damaged"] == MAX_TRIES
    assert sum(two.damaged().values()) >= MAX_TRIES


# who is listened to


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="a browser"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"KEEPWIRE\x02\0" + bytes(40), id="half a record"),
        pytest.param(b"KEEPWIRE\x02\0" + bytes(100), id="a record of zeros"),
        pytest.param(bytes(500), id="zeros"),
    ],
)
def test_a_stranger_is_refused_and_counted(town: Town, says: bytes) -> None:
    ear = Ear()
    two = town.keeper(2, ear, tcp=TcpOptions(handshake_s=0.3))
    with socket.create_connection(two.address) as stranger:
        stranger.sendall(says)
        stranger.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):  # until the keeper has hung up
                pass
    eventually(lambda: sum(two.counts().values()) == 1)
    assert ear.told.empty()


def refused(town: Town, reason: str, incarnation: int = 0, **other: Any) -> None:
    ears = Ear(), Ear()
    one, two = town.keeper(1, ears[0], **other), town.keeper(2, ears[1])
    two.connect(1, one.address, incarnation)
    one.connect(2, two.address)
    eventually(lambda: one.counts().get(f"refused by peer {reason}", 0) >= 3)
    assert two.counts()[f"refused {reason}"] >= 3
    assert ears[1].told.empty() and not one.is_open(2) and not two.is_open(1)


def test_another_secret_is_refused(town: Town) -> None:
    refused(town, "wrong_secret", secret=b"another secret, also 32 bytes...")


def test_another_job_is_refused(town: Town) -> None:
    refused(town, "wrong_job", job=b"k" * 16)


def test_an_old_incarnation_is_refused(town: Town) -> None:
    refused(town, "old_incarnation", incarnation=5)


def test_a_node_nobody_announced_is_refused(town: Town) -> None:
    ears = Ear(), Ear()
    one, two = town.keeper(1, ears[0], timeouts=IMPATIENT), town.keeper(2, ears[1])
    one.connect(2, two.address)
    assert "not expected" in ears[0].hears("dead")[2]
    assert ears[1].told.empty()


def test_a_crowd_of_silent_strangers_is_bounded(town: Town) -> None:
    """The first ones go: whoever comes is let in."""
    ear = Ear()
    two = town.keeper(2, ear, tcp=TcpOptions(handshake_s=LIMIT_S))
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(two.address)) for _ in range(70)]
        for stranger in crowd[:6]:
            stranger.settimeout(LIMIT_S)
            assert stranger.recv(26, socket.MSG_WAITALL) and stranger.recv(10) == b""
        crowd[6].settimeout(LIMIT_S)
        assert crowd[6].recv(26, socket.MSG_WAITALL)
        crowd[6].settimeout(0.0)
        with pytest.raises(BlockingIOError):
            crowd[6].recv(10)
        eventually(lambda: two.counts().get("refused busy") == 6)


def test_a_link_comes_back_though_strangers_take_every_place_again_and_again(town: Town) -> None:
    ears = Ear(), Ear()
    patient = {"tcp": TcpOptions(handshake_s=4 * LIMIT_S)}
    one, two, proxy = linked(town, *ears, proxied=True, **patient)
    assert proxy is not None
    over = threading.Event()

    def crowd() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(500):  # and as many descriptors
                stack.enter_context(socket.create_connection(two.address))
                if over.wait(0.01):
                    return
            over.wait(LIMIT_S)

    strangers = threading.Thread(target=crowd)
    strangers.start()
    try:
        eventually(lambda: two.counts().get("refused busy", 0) > 10)
        for number in range(3):
            proxy.hang_up()
            assert one.send(2, note(number))
            assert ears[1].messages.get(timeout=LIMIT_S) == note(number)
    finally:
        over.set()
        strangers.join()
    assert ears[0].told.empty() and ears[1].told.empty()  # it was never dead


# ends


def test_a_newer_life_of_a_node_replaces_the_older_one(town: Town) -> None:
    ears = Ear(), Ear(), Ear()
    _one, two, _ = linked(town, ears[0], ears[1])
    again = town.keeper(1, ears[2], incarnation=2)
    again.connect(2, two.address)
    assert ears[1].hears("dead")[1:] == (1, "replaced by a new link with incarnation 2 of node 1")
    assert ears[1].hears("up") == ("up", again.me.node)
    assert "old incarnation" in ears[0].hears("dead")[2]
    assert two.send(1, note(5)) and ears[2].messages.get(timeout=LIMIT_S) == note(5)


def test_a_fenced_life_is_cut_and_does_not_come_back(town: Town) -> None:
    ears = Ear(), Ear()
    _one, two, _ = linked(town, *ears)
    two.fence(1, 2)
    assert ears[1].hears("dead") == ("dead", 1, "fenced: incarnation 1 is older than 2")
    assert "old incarnation" in ears[0].hears("dead")[2]
    assert two.counts()["refused old_incarnation"] > 0


@pytest.mark.parametrize("replaced", [1, 2])
@pytest.mark.parametrize("how", ["forget", "fence", "connect"])
def test_a_replaced_node_is_linked_with_at_its_new_address(
    town: Town, how: str, replaced: int
) -> None:
    """The older life is still there and still dials. Whoever stays hears no `dead`, unless it
    fenced without saying who comes next."""
    ears = {1: Ear(), 2: Ear()}
    one, two, _ = linked(town, ears[1], ears[2])
    stays = one if replaced == 2 else two
    heard, ear = ears[stays.me.node], Ear()
    comes = town.keeper(replaced, ear, incarnation=2)
    if how == "forget":
        stays.forget(replaced, "replaced")
    elif how == "fence":
        stays.fence(replaced, 2)
        assert heard.hears("dead") == ("dead", replaced, "fenced: incarnation 1 is older than 2")
    stays.connect(replaced, comes.address, 2)
    comes.connect(stays.me.node, stays.address, 1)
    assert heard.hears("up") == ("up", comes.me.node) and ear.hears("up") == ("up", stays.me.node)
    assert stays.send(replaced, note(1)) and comes.send(stays.me.node, note(2))
    assert ear.messages.get(timeout=LIMIT_S) == note(1) and heard.messages.get(
        timeout=LIMIT_S
    ) == note(2)
    stays.connect(replaced, comes.address, 2)  # said again, it changes nothing
    assert stays.send(replaced, note(3)) and ear.messages.get(timeout=LIMIT_S) == note(3)
    assert heard.told.empty() and ear.told.empty()


def test_a_life_that_never_came_is_fenced_too(town: Town) -> None:
    """What was said to it is not said to the next one."""
    ears = Ear(), Ear()
    one, two = town.keeper(1, ears[0], timeouts=PATIENT), town.keeper(2, ears[1], incarnation=2)
    one.connect(2, NOWHERE, 1)
    assert one.send(2, note(1))
    one.fence(2, 2)
    assert ears[0].hears("dead") == ("dead", 2, "fenced: incarnation 1 is older than 2")
    link(one, two)
    assert ears[0].hears("up") == ("up", two.me.node)
    assert one.send(2, note(2)) and ears[1].messages.get(timeout=LIMIT_S) == note(2)


def test_the_same_life_may_be_sought_elsewhere(town: Town) -> None:
    ears = Ear(), Ear()
    one, two = town.keeper(1, ears[0], timeouts=PATIENT), town.keeper(2, ears[1])
    one.connect(2, NOWHERE, 1)
    assert one.send(2, note(1))
    one.connect(2, two.address, 1)
    two.connect(1, one.address)
    assert ears[1].messages.get(timeout=LIMIT_S) == note(1)
    assert ears[0].hears("up") == ("up", two.me.node) and ears[0].told.empty()


def test_a_late_connection_of_an_ended_link_replaces_nothing(town: Town) -> None:
    ears = Ear(), Ear()
    one, two, _ = linked(town, *ears)
    late = Connection(one.me, SECRET, bytes(32), lambda peer, asked: None, Dial(1, 0))
    with contextlib.closing(dial(two.address, "127.0.0.1", TcpOptions())) as sock:
        assert knock_at(sock, Knocker(knock_key(SECRET)), LIMIT_S) is None
        sock.sendall(late.take())
        met = None
        while met is None:
            met = late.receive(sock.recv(late.wanted))
    assert isinstance(met, Refused) and met.reason is Refusal.FORGOTTEN
    assert one.send(2, note(1)) and ears[1].messages.get(timeout=LIMIT_S) == note(1)
    assert ears[0].told.empty() and ears[1].told.empty()


def test_who_was_only_fenced_is_not_expected(town: Town) -> None:
    ears = Ear(), Ear()
    one, two = town.keeper(1, ears[0]), town.keeper(2, ears[1])
    two.fence(1, 1)
    one.connect(2, two.address)
    eventually(lambda: two.counts().get("refused not_expected", 0) > 0)


def test_goodbye_is_told_with_its_reason_and_after_what_was_said_before(town: Town) -> None:
    ears = Ear(), Ear()
    one, _, _ = linked(town, *ears)
    assert one.send(2, note(1))
    one.close("the job has ended")
    assert ears[1].hears("left") == ("left", 1, "node 1 said goodbye: the job has ended")
    assert ears[1].messages.get_nowait() == note(1)
    assert ears[0].told.empty()


def test_a_link_that_stays_away_is_dead_once_and_its_blocks_with_it(town: Town) -> None:
    """The other node vanishes without a word: all connections break, and nobody answers."""
    data = memoryview(bytes(64 * KIB))
    ears = Ear(), Ear(memoryview(bytearray(len(data))))
    one, two, proxy = linked(town, *ears, proxied=True, timeouts=IMPATIENT)
    assert proxy is not None
    ears[1].gate.clear()
    done: queue.Queue[str | None] = queue.Queue()
    for _ in range(3):
        assert one.send_block(2, span_of(data), data, done.put)
    assert ears[1].asked.wait(LIMIT_S)
    proxy.close()
    ears[1].gate.set()
    _, node, why = ears[0].hears("dead")
    assert node == 2 and why.startswith("away for") and "longer than 1.00 s" in why
    assert [done.get(timeout=LIMIT_S) for _ in range(3)] == [why] * 3
    assert ears[1].hears("dead")[1] == 1
    assert not one.send(2, note(1)) and not one.send_block(2, span_of(data), data, done.put)
    assert ears[0].told.empty() and ears[1].told.empty()
    assert not one.is_open(2) and not two.is_open(1)


def test_after_dead_a_link_is_made_anew_when_asked(town: Town) -> None:
    """Between the same two lives. What was said on the link that died is gone, what is said on the
    next one arrives."""
    ears = Ear(), Ear()
    one, two, proxy = linked(town, *ears, proxied=True, timeouts=IMPATIENT)
    assert proxy is not None and one.is_open(2) and two.is_open(1)
    proxy.close()
    assert ears[0].hears("dead")[1] == 2 and ears[1].hears("dead")[1] == 1
    assert not one.send(2, note(1)) and not two.send(1, note(1))
    link(one, two)
    assert ears[0].hears("up")[1] == two.me.node and ears[1].hears("up")[1] == one.me.node
    assert one.send(2, note(2)) and two.send(1, note(3))
    assert ears[1].messages.get(timeout=LIMIT_S) == note(2) and ears[0].messages.get(
        timeout=LIMIT_S
    ) == note(3)


def test_a_link_that_is_away_is_not_open_and_not_dead(town: Town) -> None:
    ears = Ear(), Ear()
    one, two = town.keeper(1, ears[0], timeouts=PATIENT), town.keeper(2, ears[1], timeouts=PATIENT)
    assert not one.is_open(2)
    proxy = town.proxy(two.address)
    link(one, two, proxy.address)
    assert ears[0].hears("up") and one.is_open(2)
    proxy.alter = lambda piece: None
    assert one.send(2, note(1))  # which breaks the connection
    eventually(lambda: not one.is_open(2))
    proxy.alter = lambda piece: piece
    assert ears[1].messages.get(timeout=LIMIT_S) == note(1)
    eventually(lambda: one.is_open(2))
    assert ears[0].told.empty()


def test_dead_is_told_only_once_nothing_is_written_any_more(town: Town) -> None:
    """Fenced while a block's place is being chosen: `dead` waits for it, and from then on the place
    belongs to its owner again."""
    data = memoryview(b"\xff" * MIB)
    place = memoryview(bytearray(len(data)))
    ears = Ear(), Ear(place)
    one, two, _ = linked(town, *ears)
    ears[1].gate.clear()
    done: queue.Queue[str | None] = queue.Queue()
    assert one.send_block(2, span_of(data), data, done.put) and ears[1].asked.wait(LIMIT_S)

    def open_gate() -> None:
        ears[1].told.put(("opened",))
        ears[1].gate.set()

    threading.Timer(0.2, open_gate).start()
    two.fence(1, 2)
    assert [ears[1].told.get(timeout=LIMIT_S)[0] for _ in range(2)] == ["opened", "dead"]
    assert done.get(timeout=LIMIT_S) is not None
    assert place == bytes(len(data)) and ears[1].blocks.empty()


def test_a_process_that_ends_waits_for_no_connection(town: Town) -> None:
    before = set(threading.enumerate())
    linked(town, Ear(), Ear())
    own = [thread for thread in threading.enumerate() if thread not in before]
    assert {"writer"} <= {thread.name for thread in own}
    assert all(thread.daemon for thread in own)


def test_no_thread_outlives_its_keeper(town: Town) -> None:
    before = set(threading.enumerate())
    ears = Ear(), Ear()
    one, two, _ = linked(town, *ears)
    two.close()
    one.close()
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(LIMIT_S)
    assert not [thread for thread in left if thread.is_alive()]


# a gate that says when blocks may go


class Doorkeeper:
    """Grants what it was told to, in that order, and nothing afterwards; None: everything, from
    then on."""

    def __init__(self, *grants: int | None) -> None:
        self.grants: deque[int | None] = deque(grants)
        self.asked: list[tuple[int, Flow]] = []
        self.denied = threading.Event()

    def ask(self, nbytes: int, flow: Flow) -> tuple[int, int]:
        self.asked.append((nbytes, flow))
        if self.grants and self.grants[0] is None:
            return nbytes, 0
        if self.grants:
            return min(nbytes, self.grants.popleft() or 0), 0
        self.denied.set()
        return 0, MS_NS


def test_a_block_goes_in_the_pieces_that_are_granted(town: Town) -> None:
    data = memoryview(random.Random(5).randbytes(3 * MIB))
    there = memoryview(bytearray(len(data)))
    ears, gate = (Ear(), Ear(there)), Doorkeeper(KIB, 700 * KIB, 300 * KIB, 2 * KIB, MIB, MIB)
    one, two = town.keeper(1, ears[0], gate=gate), town.keeper(2, ears[1])
    link(one, two)
    done = send_all(one, 2, data, 3 * MIB // 2, ears[0])
    assert gate.denied.wait(LIMIT_S)
    left = [nbytes for nbytes, _ in gate.asked]
    granted = [KIB, 700 * KIB, 300 * KIB, 2 * KIB]
    assert left[:5] == [3 * MIB // 2 - sum(granted[:n]) for n in range(5)]
    assert all(flow.node == 2 and flow.queued_bytes >= 0 for _, flow in gate.asked)
    assert two.counts().get("block bytes received", 0) < len(data)
    gate.grants.append(None)
    all_done(done, 2)
    assert there == data


@pytest.mark.parametrize("node", [1, 2], ids=["the side that dials", "the other"])
@pytest.mark.parametrize(
    "grants", [(), (100 * KIB,)], ids=["before a block", "in the middle of one"]
)
def test_a_shut_gate_holds_no_message_and_no_answer(
    town: Town, node: int, grants: tuple[int, ...]
) -> None:
    data = memoryview(random.Random(6).randbytes(MIB))
    here, gate = memoryview(bytearray(len(data))), Doorkeeper(*grants)
    ears = {node: Ear(here), 3 - node: Ear(memoryview(bytearray(len(data))))}
    peers = {n: town.keeper(n, ears[n], gate=gate if n == node else None) for n in (1, 2)}
    link(peers[1], peers[2])
    held = send_all(peers[node], 3 - node, data, MIB, ears[node])
    assert gate.denied.wait(LIMIT_S)
    # answered by the side whose block is held
    all_done(send_all(peers[3 - node], node, data, MIB, ears[3 - node]), 1)
    assert here == data and held.empty()
    assert peers[node].send(3 - node, note(1)) and ears[3 - node].messages.get(
        timeout=LIMIT_S
    ) == note(1)
    peers[node].close()  # a link ends while a block is held
    assert held.get(timeout=LIMIT_S) == "closing"


def test_a_connection_that_breaks_while_a_block_is_held_in_its_middle(town: Town) -> None:
    data = memoryview(random.Random(7).randbytes(MIB))
    there = memoryview(bytearray(len(data)))
    ears, gate = (Ear(), Ear(there)), Doorkeeper(100 * KIB)
    one, two = town.keeper(1, ears[0], gate=gate), town.keeper(2, ears[1])
    proxy = town.proxy(two.address)
    link(one, two, proxy.address)
    done = send_all(one, 2, data, MIB, ears[0])
    assert gate.denied.wait(LIMIT_S)
    eventually(lambda: two.counts().get("block bytes received", 0) > 0 or ears[1].asked.is_set())
    for sock in list(proxy._socks):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    eventually(lambda: one.counts().get("connections lost", 0) > 0)
    gate.grants.append(None)
    all_done(done, 1)
    assert there == data


def test_strangers_cost_no_thread_and_no_place_in_which_a_neighbour_is_heard(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are at the porch, for as long as they like, and there is one place behind it."""
    monkeypatch.setattr(peers_module, "MAX_UNPROVEN", 1)
    ears = Ear(), Ear()
    one, two = (
        town.keeper(node, ear, timeouts=PATIENT, tcp=TcpOptions(handshake_s=4 * LIMIT_S))
        for node, ear in enumerate(ears)
    )
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for number in range(40):
            sock = stack.enter_context(socket.create_connection(two.address, LIMIT_S))
            sock.sendall(GREETING * (number % 2))
            assert len(sock.recv(26, socket.MSG_WAITALL)) == 26, "let onto the porch"
        assert threading.active_count() == before
        link(one, two)
        for ear in ears:
            ear.hears("up")


def test_a_knock_that_was_right_once_opens_nothing_again(town: Town) -> None:
    """A stranger has heard all that a neighbour says, and says it again."""
    said: list[bytes] = []
    ears, told = (Ear(), Ear()), queue.Queue[tuple[str, str]]()
    one = town.keeper(1, ears[0])
    two = town.keeper(2, ears[1], refused=lambda source, why: told.put((source, why)))
    proxy = town.proxy(two.address)
    proxy.alter = lambda piece: said.append(piece) or piece
    link(one, two, proxy.address)
    assert ears[0].hears("up") and ears[1].hears("up")
    first = said.index(GREETING)
    knock = next(piece for piece in said[first + 1 :] if len(piece) in (16, 16 + 84))
    begun = two.counts().get("handshakes broken", 0)
    with socket.create_connection(two.address, LIMIT_S, ("127.0.0.99", 0)) as stranger:
        stranger.sendall(GREETING + knock[:16])
        assert stranger.recv(26, socket.MSG_WAITALL).startswith(GREETING)
        assert stranger.recv(84, socket.MSG_WAITALL) == refusal_record(Refusal.WRONG_SECRET)
        assert stranger.recv(1) == b""
    source, why = told.get(timeout=LIMIT_S)
    assert source == "127.0.0.99" and "not under this job's secret" in why
    assert two.counts()["refused wrong_secret"] == 1
    assert two.counts().get("handshakes broken", 0) == begun, "no handshake was begun"


def test_who_does_not_knock_in_time_is_sent_away_and_told_of(town: Town) -> None:
    told = queue.Queue[tuple[str, str]]()
    two = town.keeper(
        2,
        Ear(),
        tcp=TcpOptions(handshake_s=0.3),
        refused=lambda source, why: told.put((source, why)),
    )
    with socket.create_connection(two.address, LIMIT_S, ("127.0.0.99", 0)) as stranger:
        stranger.sendall(GREETING + bytes(15))
        assert len(stranger.recv(26, socket.MSG_WAITALL)) == 26 and stranger.recv(1) == b""
    assert told.get(timeout=LIMIT_S) == ("127.0.0.99", "late: no knock within 0.3 s")
    assert two.counts() == {"refused late": 1}


@pytest.mark.parametrize("says", ["challenge", "refusal"])
def test_a_keeper_of_another_version_is_named(town: Town, says: str) -> None:
    """One that is dialled: of this release's next, and of the one before there were knocks, which
    answers a greeting that it does not know with a refusal."""
    one = town.keeper(1, Ear())
    other = MAGIC + (VERSION + 1).to_bytes(2, "little")
    with socket.create_server(("127.0.0.1", 0)) as older:
        one.connect(2, older.getsockname())
        sock, _ = older.accept()
        with sock:
            assert sock.recv(10, socket.MSG_WAITALL) == GREETING
            sock.sendall(other + (bytes(16) if says == "challenge" else bytes([3, 2]) + bytes(72)))
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    eventually(lambda: one.counts().get("refused version", 0) >= 1)


def test_a_dialler_of_another_version_is_told_so(town: Town) -> None:
    two = town.keeper(2, Ear())
    with socket.create_connection(two.address, LIMIT_S) as older:
        older.sendall(MAGIC + b"\4\0" + bytes(74))
        assert older.recv(26, socket.MSG_WAITALL).startswith(GREETING)
        assert older.recv(84, socket.MSG_WAITALL) == refusal_record(Refusal.VERSION)
    eventually(lambda: two.counts() == {"refused version": 1})
