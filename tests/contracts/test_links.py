"""What `Links` do between keepers: everything arrives once, in order and whole, or somebody is told
why not."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from keepstep.coding.checksum import checksum
from keepstep.core.wire.streams import StreamLimits
from keepstep.edge.net.tcp_links import TcpLinks
from keepstep.errors import KeeperError
from keepstep.model.messages.peers import MeshMessage, RanksEnded
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MIB, S_NS
from keepstep.model.wire import Part, Span
from keepstep.ports import Links, Receiver
from keepstep.runtime.keeper.open_links import open_tcp_links
from tests.contracts.simulated import SimTown
from tests.edge.net.nixl import needs_nixl
from tests.edge.proxy import Proxy

PATIENCE_S = 60.0
DEAD_NS = 3 * S_NS
JOB, SECRET, HERE = b"j" * 16, b"s" * 16, "127.0.0.1"
STAMP = Stamp(7, 1)


class Town(Protocol):
    """Where keepers live and reach each other. Of two that are linked, the one with the lower
    number is reached last."""

    def open(
        self,
        node: int,
        receiver: Receiver,
        incarnation: int = 1,
        host: str = HERE,
        streams: int = 1,
        interfaces: int = 1,
    ) -> Links:
        """The links of one more life of that node's keeper; it was told which node it is.
        `streams`: over so many it sends its blocks."""

    def connections(self, links: Links) -> list[int]:
        """How many other keepers have made to each of its interfaces."""

    def unplug(self, links: Links) -> None:
        """Its last interface carries nothing more."""

    def address(self, links: Links) -> tuple[str, int]:
        """Where others are to reach it."""

    def tell_again(self, node: int, links: Links) -> None:
        """It is told which node it is, and all else as before."""

    def shake(self, links: Links) -> None:
        """All connections that were made to it break, and may be made again."""

    def strand(self, links: Links) -> None:
        """And may not be made again."""

    def tear(self, links: Links) -> None:
        """The same as `shake`, in the middle of something that is on its way: now, or soon."""

    def halve(self, links: Links) -> None:
        """All connections that were made to it break, and only who has made them is told."""

    def stall(self, links: Links) -> None:
        """Nothing gets there any more, over connections that are made or will be; what goes the
        other way does."""

    def resume(self, links: Links) -> None:
        """Everything gets there again, with what was late."""

    def stranger(self, links: Links, says: bytes) -> None:
        """Somebody connects, says this, and stays until the other side hangs up."""

    def until(self, holds: Callable[[], bool]) -> None:
        """Time passes until that is so."""

    def close(self) -> None: ...


class TcpTown:
    """On loopback, each keeper behind a proxy."""

    def __init__(self, encrypt: bool, transport: str = "tcp") -> None:
        self._encrypt = encrypt
        self._transport = transport
        self._made: dict[tuple[str, int], tuple[TcpLinks, Proxy]] = {}

    def open(
        self,
        node: int,
        receiver: Receiver,
        incarnation: int = 1,
        host: str = HERE,
        streams: int = 1,
        interfaces: int = 1,
    ) -> Links:
        """Interfaces but the first are reached without the proxy."""
        links = open_tcp_links(
            JOB,
            incarnation,
            (host, 0),
            DEAD_NS,
            receiver,
            streams=StreamLimits.of(streams),
            more_hosts=[f"127.0.{node}.{each}" for each in range(1, interfaces)],
            transport=self._transport,
        )
        self._made[links.address] = links, Proxy(links.address)
        self.tell_again(node, links)
        return links

    def connections(self, links: Links) -> list[int]:
        return [len(ends) for ends in self._ends_of(links)]

    def _ends_of(self, links: Links) -> list[list[socket.socket]]:
        """The accepted ends of what was made to each of its addresses."""
        own = self._made[links.address][0]
        assert own._peers is not None
        ends: list[list[socket.socket]] = []
        for address in own._peers.addresses:
            ends.append([])
            for each in gc.get_objects():
                if isinstance(each, socket.socket) and each.fileno() >= 0:
                    with contextlib.suppress(OSError):
                        if each.getsockname() == address and each.getpeername():
                            ends[-1].append(each)
        return ends

    def unplug(self, links: Links) -> None:
        own = self._made[links.address][0]
        assert own._peers is not None
        own._peers._listeners[-1].shutdown(socket.SHUT_RDWR)
        for end in self._ends_of(links)[-1]:
            end.shutdown(socket.SHUT_RDWR)

    def address(self, links: Links) -> tuple[str, int]:
        return self._made[links.address][1].address

    def tell_again(self, node: int, links: Links) -> None:
        links.be(node, SECRET, self._encrypt)

    def shake(self, links: Links) -> None:
        self._made[links.address][1].hang_up()

    def strand(self, links: Links) -> None:
        self._made[links.address][1].close()

    def tear(self, links: Links) -> None:
        """After some tens of thousands of bytes, or of hundreds."""
        proxy, budget = self._made[links.address][1], random.Random(6).choice([90, 40_000])

        def cut(piece: bytes) -> bytes | None:
            nonlocal budget
            kept = piece[:budget]
            budget -= len(kept)
            if budget:
                return piece
            proxy.alter = lambda data: data
            threading.Timer(0.01, proxy.hang_up).start()
            return kept

        proxy.alter = cut

    def halve(self, links: Links) -> None:
        self._made[links.address][1].halve()

    def stall(self, links: Links) -> None:
        self._made[links.address][1].flows.clear()

    def resume(self, links: Links) -> None:
        self._made[links.address][1].flows.set()

    def stranger(self, links: Links, says: bytes) -> None:
        with socket.create_connection(links.address) as stranger:
            stranger.sendall(says)
            stranger.settimeout(PATIENCE_S)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1000):
                    pass

    def until(self, holds: Callable[[], bool]) -> None:
        until_s, tick = time.monotonic() + PATIENCE_S, threading.Event()
        while not holds():
            assert time.monotonic() < until_s, "it does not come about"
            tick.wait(0.01)

    def close(self) -> None:
        for links, proxy in self._made.values():
            links.close()
            proxy.close()


TOWNS: dict[str, Callable[[], Town]] = {
    "tcp": lambda: TcpTown(encrypt=False),
    "encrypted tcp": lambda: TcpTown(encrypt=True),
    "nixl": lambda: TcpTown(encrypt=False, transport="nixl"),
    "encrypted nixl": lambda: TcpTown(encrypt=True, transport="nixl"),
    "simulated": lambda: SimTown(DEAD_NS, JOB, SECRET),
}


@pytest.fixture(
    params=[pytest.param(name, marks=[needs_nixl] if "nixl" in name else []) for name in TOWNS]
)
def town(request: pytest.FixtureRequest) -> Iterator[Town]:
    made = TOWNS[request.param]()
    yield made
    made.close()


class Ear:
    """Keeps what it is told, and has blocks placed in `memory`, if it has one, at their offset."""

    def __init__(self, nbytes: int = 0) -> None:
        self.memory = bytearray(nbytes)
        self.told: list[tuple[Any, ...]] = []  # links' beginnings and ends
        self.numbers: list[int] = []
        self.blocks: list[tuple[int, Span, int]] = []
        self.times_writable = 0

    def up(self, node: int) -> None:
        self.told.append(("up", node))

    def message(self, node: int, message: MeshMessage) -> None:
        self.numbers.append(message.mesh_version)

    def place(self, node: int, span: Span) -> memoryview | None:
        return (
            memoryview(self.memory)[span.offset : span.offset + span.length]
            if self.memory
            else None
        )

    def block(self, node: int, span: Span, checksum: int) -> None:
        self.blocks.append((node, span, checksum))

    def writable(self, node: int) -> None:
        self.times_writable += 1

    def dead(self, node: int, why: str, is_loss: bool) -> None:
        self.told.append(("dead" if is_loss else "left", node, why))


def note(number: int) -> MeshMessage:
    return RanksEnded(number)


def span_of(nbytes: int, offset: int = 0) -> Span:
    return Span(0, STAMP, Part.PAYLOAD, offset, nbytes)


def linked(town: Town, *ears: Ear) -> tuple[Links, Links]:
    """Nodes 1 and 2, once both know that they are."""
    one, two = town.open(1, ears[0]), town.open(2, ears[1])
    one.connect(2, town.address(two))
    two.connect(1, town.address(one))
    town.until(lambda: ears[0].told == [("up", 2)] and ears[1].told == [("up", 1)])
    return one, two


def linked_by(town: Town, *ears: Ear, streams: int, interfaces: int) -> tuple[Links, Links]:
    """Nodes 1 and 2, once all their connections are there."""
    one = town.open(1, ears[0], streams=streams, interfaces=interfaces)
    two = town.open(2, ears[1], streams=streams, interfaces=interfaces)
    one.connect(2, town.address(two))
    two.connect(1, town.address(one))
    each_way = max(streams, interfaces)
    town.until(lambda: sum(town.connections(two)) == 1 + 2 * each_way)
    return one, two


def send_all(links: Links, node: int, data: bytes, count: int) -> list[str | None]:
    """In so many blocks."""
    done: list[str | None] = []
    nbytes = len(data) // count
    for at in range(0, len(data), nbytes):
        source = memoryview(data)[at : at + nbytes]
        assert links.send_block(node, span_of(nbytes, at), source, done.append)
    return done


@pytest.mark.parametrize(("streams", "interfaces"), [(3, 1), (1, 2), (4, 2)])
def test_blocks_cross_over_several_streams_and_interfaces_both_ways(
    town: Town, streams: int, interfaces: int
) -> None:
    data = random.Random(9).randbytes(16 * MIB)
    ears = Ear(len(data)), Ear(len(data))
    one, two = linked_by(town, *ears, streams=streams, interfaces=interfaces)
    each_way = max(streams, interfaces)
    shares = [2 * each_way // interfaces] * interfaces
    shares[0] += 1  # messages
    assert town.connections(two) == shares
    forth, back = send_all(one, 2, data, 64), send_all(two, 1, data, 64)
    town.until(lambda: len(forth) == len(back) == 64)
    assert forth == back == [None] * 64 and ears[0].memory == ears[1].memory == data
    assert len(ears[0].blocks) == len(ears[1].blocks) == 64, "each once"


def test_several_streams_outlive_their_connections(town: Town) -> None:
    data = random.Random(10).randbytes(8 * MIB)
    ears = Ear(), Ear(len(data))
    one, two = linked_by(town, *ears, streams=3, interfaces=1)
    done: list[str | None] = []
    for number in range(32):
        at = number * MIB // 4
        source = memoryview(data)[at : at + MIB // 4]
        assert one.send_block(2, span_of(MIB // 4, at), source, done.append)
        assert one.send(2, note(number))
        if number % 12 == 5:
            town.shake(two)
    town.until(lambda: len(done) == 32 and len(ears[1].numbers) == 32)
    assert done == [None] * 32 and ears[1].memory == data and len(ears[1].blocks) == 32
    assert ears[1].numbers == list(range(32)), "messages keep their order"
    assert ears[0].told == [("up", 2)] and ears[1].told == [("up", 1)]


def test_what_an_interface_carried_goes_over_the_others_when_it_fails(town: Town) -> None:
    data = random.Random(11).randbytes(16 * MIB)
    ears = Ear(len(data)), Ear(len(data))
    one, two = linked_by(town, *ears, streams=1, interfaces=2)
    forth, back = send_all(one, 2, data, 64), send_all(two, 1, data, 64)
    town.unplug(two)
    town.until(lambda: len(forth) == len(back) == 64)
    assert forth == back == [None] * 64 and ears[0].memory == ears[1].memory == data
    assert len(ears[0].blocks) == len(ears[1].blocks) == 64, "each once"
    town.until(lambda: town.connections(two) == [5, 0])
    assert ears[0].told == [("up", 2)] and ears[1].told == [("up", 1)]


def test_a_link_is_open_when_both_ends_want_it(town: Town) -> None:
    ears = Ear(), Ear(), Ear()
    one, three = town.open(1, ears[0]), town.open(3, ears[2])
    two = town.open(2, ears[1])
    for links in (one, two, three):
        assert links.address[1] > 0
    one.connect(3, town.address(three))  # which never wants it
    one.connect(2, town.address(two))
    assert not one.is_open(2) and not two.is_open(1)
    two.connect(1, town.address(one))
    town.until(lambda: one.is_open(2) and two.is_open(1))
    assert ears[0].told == [("up", 2)] and ears[1].told == [("up", 1)] and ears[2].told == []
    assert not one.is_open(3) and not three.is_open(1)


def test_an_address_that_is_somebody_elses_is_refused(town: Town) -> None:
    with pytest.raises(KeeperError, match=r"192\.0\.2\.1"):
        town.open(1, Ear(), host="192.0.2.1")


def test_without_a_link_nothing_is_taken(town: Town) -> None:
    links = town.open(1, Ear())
    assert not links.send(2, note(1)) and not links.is_open(2)
    assert not links.send_block(2, span_of(10), memoryview(bytes(10)), lambda why: None)


def test_messages_come_once_and_in_order_both_ways(town: Town) -> None:
    ears = Ear(), Ear()
    one, two = linked(town, *ears)
    for number in range(300):
        assert one.send(2, note(number)) and two.send(1, note(1000 + number))
    town.until(lambda: len(ears[0].numbers) >= 300 and len(ears[1].numbers) >= 300)
    assert ears[1].numbers == list(range(300)) and ears[0].numbers == list(range(1000, 1300))


def test_a_link_outlives_its_connections(town: Town) -> None:
    ears = Ear(), Ear()
    one, two = linked(town, *ears)
    for number in range(200):
        assert one.send(2, note(number)) and two.send(1, note(number))
        if number % 50 == 25:
            town.shake(two)
    town.until(lambda: len(ears[0].numbers) >= 200 and len(ears[1].numbers) >= 200)
    assert ears[0].numbers == ears[1].numbers == list(range(200))
    assert ears[0].told == [("up", 2)] and ears[1].told == [("up", 1)], "nobody is told of that"


@pytest.mark.parametrize("known", [True, False])
def test_blocks_come_whole_to_their_place(town: Town, known: bool) -> None:
    data = random.Random(3).randbytes(2 * MIB + 17)
    ears = Ear(), Ear(len(data))
    one, _ = linked(town, *ears)
    done: list[str | None] = []
    spans = [span_of(MIB + 10, 0), span_of(1, MIB + 10), span_of(MIB + 6, MIB + 11)]
    for span in spans:
        source = memoryview(data)[span.offset : span.offset + span.length]
        assert one.send_block(2, span, source, done.append, checksum(source) if known else None)
    town.until(lambda: len(done) == 3)
    assert done == [None] * 3 and ears[1].memory == data
    expected = [
        (1, span, checksum(data[span.offset : span.offset + span.length])) for span in spans
    ]
    assert sorted(ears[1].blocks, key=lambda b: b[1].offset) == expected


def test_blocks_outlive_connections_too(town: Town) -> None:
    data = random.Random(4).randbytes(8 * MIB)
    ears = Ear(), Ear(len(data))
    one, two = linked(town, *ears)
    done: list[str | None] = []
    for at in range(0, len(data), MIB):
        assert one.send_block(2, span_of(MIB, at), memoryview(data)[at : at + MIB], done.append)
        if at % (4 * MIB) == MIB:
            town.shake(two)
    town.until(lambda: len(done) == 8)
    assert done == [None] * 8 and ears[1].memory == data


def test_what_is_torn_on_its_way_comes_again_whole(town: Town) -> None:
    """In the middle of frames and of blocks."""
    data = random.Random(7).randbytes(2 * MIB)
    ears = Ear(), Ear(len(data))
    one, two = linked(town, *ears)
    done: list[str | None] = []
    for number in range(16):
        at = number * (MIB // 8)
        source = memoryview(data)[at : at + MIB // 8]
        assert one.send_block(2, span_of(MIB // 8, at), source, done.append)
        assert one.send(2, note(number)) and two.send(1, note(number))
        if number % 4 == 1:
            town.tear(two)
            town.until(lambda n=number: len(ears[1].numbers) > n - 4)  # type: ignore[misc]
    town.until(lambda: len(done) == 16 and len(ears[0].numbers) == len(ears[1].numbers) == 16)
    assert done == [None] * 16 and ears[1].memory == data and len(ears[1].blocks) == 16
    assert ears[0].numbers == ears[1].numbers == list(range(16))
    assert ears[0].told == [("up", 2)] and ears[1].told == [("up", 1)]


def test_a_second_connection_takes_over_from_one_that_only_one_end_has_lost(town: Town) -> None:
    data = random.Random(8).randbytes(MIB)
    ears = Ear(), Ear(len(data))
    one, two = linked(town, *ears)
    done: list[str | None] = []
    for number in range(30):
        assert one.send(2, note(number)) and two.send(1, note(number))
        if number % 10 == 5:
            at = number // 10 * 1000
            assert one.send_block(
                2, span_of(1000, at), memoryview(data)[at : at + 1000], done.append
            )
            town.halve(two)
            town.until(lambda n=number: len(ears[1].numbers) == n + 1)  # type: ignore[misc]
    town.until(lambda: len(ears[0].numbers) == len(ears[1].numbers) == 30 and len(done) == 3)
    assert ears[0].numbers == ears[1].numbers == list(range(30))
    assert done == [None] * 3 and ears[1].memory[:3000] == data[:3000]
    assert ears[0].told == [("up", 2)] and ears[1].told == [("up", 1)]


def test_one_direction_that_stalls_is_waited_out(town: Town) -> None:
    """Whoever hears nothing breaks the connection; what goes the other way is not said twice."""
    ears = Ear(), Ear()
    one, two = linked(town, *ears)
    town.stall(two)
    for number in range(10):
        assert one.send(2, note(number)) and two.send(1, note(number))
    town.until(lambda: len(ears[0].numbers) == 10)
    town.until(lambda: not one.is_open(2) and not two.is_open(1))
    assert ears[1].numbers == []
    town.resume(two)
    town.until(lambda: len(ears[1].numbers) == 10 and one.is_open(2) and two.is_open(1))
    assert ears[0].numbers == ears[1].numbers == list(range(10))
    assert ears[0].told == [("up", 2)] and ears[1].told == [("up", 1)]


def test_an_older_life_that_dials_again_replaces_nothing(town: Town) -> None:
    ears = Ear(), Ear(), Ear()
    older, two = linked(town, *ears[:2])
    newer = town.open(1, ears[2], incarnation=2)
    newer.connect(2, town.address(two))
    town.until(lambda: len(ears[1].told) == 3 and len(ears[2].told) == 1)
    assert [t[:2] for t in ears[1].told[1:]] == [("dead", 1), ("up", 1)]
    for times in (2, 3):  # it may try again: nobody listens
        town.until(lambda n=times: len(ears[0].told) == n)  # type: ignore[misc]
        assert ears[0].told[-1][:2] == ("dead", 2)
        older.connect(2, town.address(two))
    assert newer.send(2, note(1)) and two.send(1, note(2))
    town.until(lambda: ears[1].numbers == [1] and ears[2].numbers == [2])
    assert ears[2].told == [("up", 2)] and len(ears[1].told) == 3


def test_a_stranger_is_not_listened_to(town: Town) -> None:
    ears = Ear(), Ear()
    one, two = linked(town, *ears)
    before = sum(two.counts().values())
    town.stranger(two, b"GET / HTTP/1.1\r\n\r\n")
    town.until(lambda: sum(two.counts().values()) > before)
    assert one.send(2, note(1))
    town.until(lambda: ears[1].numbers == [1])
    assert ears[0].told == [("up", 2)] and ears[1].told == [("up", 1)]


def test_who_sends_what_is_not_wanted_is_told(town: Town) -> None:
    ears = Ear(), Ear()
    one, _ = linked(town, *ears)
    done: list[str | None] = []
    assert one.send_block(2, span_of(1000), memoryview(bytes(1000)), done.append)
    town.until(lambda: bool(done))
    assert done[0] is not None and "want" in done[0] and ears[1].blocks == []


def test_a_source_that_is_not_what_its_checksum_says_does_not_arrive(town: Town) -> None:
    ears = Ear(), Ear(1000)
    one, _ = linked(town, *ears)
    done: list[str | None] = []
    assert one.send_block(
        2, span_of(1000), memoryview(bytes(1000)), done.append, checksum(b"something else")
    )
    town.until(lambda: bool(done))
    assert done[0] is not None and "damaged" in done[0] and ears[1].blocks == []


def test_nothing_queues_without_bound_and_who_was_refused_is_told_when_to_go_on(town: Town) -> None:
    data = memoryview(random.Random(5).randbytes(4 * MIB))
    ears = Ear(), Ear(len(data))
    one, _ = linked(town, *ears)
    done: list[str | None] = []
    taken = 0
    while one.send_block(2, span_of(len(data)), data, done.append, checksum(data)):
        taken += 1
        assert taken < 1000, "everything is taken"
    town.until(lambda: ears[0].times_writable > 0)
    assert one.send_block(2, span_of(len(data)), data, done.append, checksum(data))
    town.until(lambda: len(done) == taken + 1)
    assert done == [None] * (taken + 1)


def test_a_goodbye_comes_after_what_was_said_before(town: Town) -> None:
    ears = Ear(), Ear()
    one, two = linked(town, *ears)
    assert one.send(2, note(1))
    one.close("the job is over here")
    town.until(lambda: len(ears[1].told) == 2)
    kind, node, why = ears[1].told[1]
    assert (kind, node) == ("left", 1) and "the job is over here" in why
    assert ears[1].numbers == [1] and not two.is_open(1) and not two.send(1, note(2))
    assert ears[0].told == [("up", 2)], "who says goodbye knows"


def test_a_link_that_stays_away_is_dead_once_with_all_it_carried(town: Town) -> None:
    ears = Ear(), Ear(1000)
    one, two = linked(town, *ears)
    town.strand(two)
    done: list[str | None] = []
    town.until(lambda: not one.is_open(2))
    assert one.send_block(2, span_of(1000), memoryview(bytes(1000)), done.append)
    town.until(lambda: len(ears[0].told) == len(ears[1].told) == 2)
    assert [t[:2] for t in (ears[0].told[1], ears[1].told[1])] == [("dead", 2), ("dead", 1)]
    town.until(lambda: bool(done))
    assert done[0] is not None and ears[1].blocks == []
    assert not one.is_open(2) and not one.send(2, note(1))


def test_after_dead_the_link_is_made_anew_when_asked(town: Town) -> None:
    ears = Ear(), Ear(), Ear()
    one, two = linked(town, *ears[:2])
    town.strand(two)
    town.until(lambda: len(ears[0].told) == 2)
    again = town.open(2, ears[2], incarnation=2)
    again.connect(1, town.address(one))
    one.connect(2, town.address(again), 2)
    town.until(lambda: len(ears[0].told) == 3 and len(ears[2].told) == 1)
    assert ears[0].told[2] == ("up", 2) and ears[2].told == [("up", 1)]
    assert one.send(2, note(5)) and again.send(1, note(6))
    town.until(lambda: ears[2].numbers == [5] and ears[0].numbers == [6])


def test_a_newer_life_takes_the_place_of_the_older_one(town: Town) -> None:
    """The older one is still there and still wants to be linked with. Whoever says which life it
    wants is told of no end."""
    ears = Ear(), Ear(), Ear()
    one, _ = linked(town, *ears[:2])
    newer = town.open(2, ears[2], incarnation=2)
    one.connect(2, town.address(newer), 2)
    newer.connect(1, town.address(one))
    town.until(lambda: len(ears[0].told) == 2 and len(ears[2].told) == 1)
    assert ears[0].told == [("up", 2), ("up", 2)]
    assert one.send(2, note(1)) and newer.send(1, note(2))
    town.until(lambda: ears[2].numbers == [1] and ears[0].numbers == [2])
    assert ears[1].numbers == []


def test_a_number_may_be_another_machines_that_began_earlier(town: Town) -> None:
    """Machines change their numbers, and clocks differ: whoever says where a node is now is
    believed."""
    ears = Ear(), Ear(), Ear()
    one, two = town.open(1, ears[0]), town.open(2, ears[1], incarnation=7)
    one.connect(2, town.address(two), 7)
    two.connect(1, town.address(one))
    town.until(lambda: ears[0].told == [("up", 2)] and ears[1].told == [("up", 1)])
    town.strand(two)
    other = town.open(2, ears[2], incarnation=5)
    one.connect(2, town.address(other), 5)
    other.connect(1, town.address(one))
    town.until(lambda: ears[0].told == [("up", 2), ("up", 2)] and ears[2].told == [("up", 1)])
    assert one.send(2, note(1)) and other.send(1, note(2))
    town.until(lambda: ears[2].numbers == [1] and ears[0].numbers == [2])


def test_asking_again_for_a_link_that_is_there_changes_nothing(town: Town) -> None:
    ears = Ear(), Ear()
    one, two = linked(town, *ears)
    one.connect(2, town.address(two), 1)
    two.connect(1, town.address(one), 1)
    town.tell_again(2, two)
    assert one.send(2, note(1)) and two.send(1, note(2))
    town.until(lambda: ears[1].numbers == [1] and ears[0].numbers == [2])
    assert ears[0].told == [("up", 2)] and ears[1].told == [("up", 1)]


def test_another_number_begins_without_links(town: Town) -> None:
    ears = Ear(), Ear()
    one, two = linked(town, *ears)
    town.tell_again(3, two)
    assert not two.is_open(1) and not two.send(1, note(1))
    town.until(lambda: len(ears[0].told) == 2)
    assert ears[0].told[1][:2] == ("left", 2)
    one.connect(3, town.address(two))
    two.connect(1, town.address(one))
    town.until(lambda: one.is_open(3) and two.is_open(1))
    assert one.send(3, note(4))
    town.until(lambda: ears[1].numbers == [4])


def test_what_crossed_is_counted_for_people(town: Town) -> None:
    ears = Ear(), Ear(1000)
    one, _ = linked(town, *ears)
    before, done = sum(one.counts().values()), list[str | None]()
    assert one.send_block(2, span_of(1000), memoryview(bytes(1000)), done.append)
    town.until(lambda: done == [None])
    assert sum(one.counts().values()) > before


def test_links_that_are_to_be_encrypted_from_now_on_are_made_anew() -> None:
    """As for a keeper that was there before the setting changed. Until the other side is told as
    well, neither says anything."""
    town = TcpTown(encrypt=False)
    ears = Ear(), Ear()
    try:
        one, two = linked(town, *ears)
        two.be(2, SECRET, True)
        assert not two.is_open(1)
        town.until(lambda: len(ears[0].told) == 2)
        two.connect(1, town.address(one))
        one.connect(2, town.address(two))
        town.until(lambda: one.counts().get("refused by peer encryption", 0) > 0)
        assert not one.is_open(2) and not two.is_open(1)
        one.be(1, SECRET, True)
        one.connect(2, town.address(two))
        town.until(lambda: one.is_open(2) and two.is_open(1))
    finally:
        town.close()
