"""Somebody in the middle reads what crosses between two nodes, rewrites and repeats it. Blocks that
are rewritten so that their checksums stay right: with MACs nothing of it is taken, and who sent it
is told. Of what is encrypted nothing can be read, nor changed in any of its bytes."""

from __future__ import annotations

import queue
import random
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from keepstep.coding.checksum import checksum
from keepstep.core.wire.connection import WireFormat
from keepstep.core.wire.delivery import MAX_TRIES
from keepstep.core.wire.health import LinkTimeouts
from keepstep.core.wire.traffic import LinkOptions
from keepstep.edge.net.peers import PeerOptions, Peers
from keepstep.model.messages.peers import CopyDeclined, RanksEnded
from keepstep.model.units import KIB
from keepstep.model.wire import Identity
from keepstep.runtime.keeper.open_links import HASHING, new_link_table, wire_format
from tests.edge.net.test_peers import (
    IMPATIENT,
    JOB,
    LIMIT_S,
    PATIENT,
    SECRET,
    STAMP,
    Ear,
    link,
    span_of,
)
from tests.edge.proxy import Proxy

FORGED_AT, SACRIFICED = 64 * 3, (0, 1, 2, 15)  # stripes of 64 bytes, within the first 1024
# the secret of XXH3 without a seed, of which one block takes 23 words
XXH3_SECRET = struct.unpack(
    "<23Q",
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07d"
        "ccff7221b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e"
        "3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac83"
        "34d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce"
        "45cb3a8f95160428"
    ),
)
LOW, ALL = (1 << 32) - 1, (1 << 64) - 1


def forged(data: bytes, new: bytes) -> bytes:
    """`data` with `new` in it, under the same XXH3: four stripes of the 1024 bytes around make up
    for what the others add, lane by lane."""
    stripes = [list(struct.unpack_from("<8Q", data, 64 * n)) for n in range(16)]
    block = bytearray(data[:1024])
    block[FORGED_AT : FORGED_AT + len(new)] = new
    changed = [list(struct.unpack_from("<8Q", block, 64 * n)) for n in range(16)]
    for lane in range(8):
        keys = [XXH3_SECRET[n + lane] for n in range(16)]
        products = sums = 0
        for n in range(16):
            products += _product(stripes[n][lane], keys[n])
            sums += stripes[n][lane]
            if n not in SACRIFICED:
                products -= _product(changed[n][lane], keys[n])
                sums -= changed[n][lane]
        first, second, third, fourth = (keys[n] for n in SACRIFICED)
        high, low = divmod(products & ALL, LOW)
        made = [(high << 32 | LOW) ^ first, (low << 32 | 1) ^ second]
        rest = (sums - sum(made)) & ALL
        of_fourth = (rest - (third & LOW)) & LOW
        of_third = ((((rest - (third & LOW) - of_fourth) & ALL) >> 32) - (fourth >> 32)) & LOW
        made += [of_third << 32 | third & LOW, fourth >> 32 << 32 | of_fourth]
        for n, word in zip(SACRIFICED, made, strict=True):
            changed[n][lane] = word
    return b"".join(struct.pack("<8Q", *words) for words in changed) + data[1024:]


def _product(word: int, key: int) -> int:
    mixed = word ^ key
    return (mixed & LOW) * (mixed >> 32)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("block_mac", ["on", "off"])
def test_forged_bytes_under_the_right_checksum(block_mac: str, stack: ExitStack) -> None:
    """Without MACs they are taken: it is a forgery that works."""
    data = random.Random(1).randbytes(4096)
    forgery = forged(data, b"what the attacker wants".ljust(700, b"!"))
    assert forgery != data and checksum(forgery) == checksum(data)

    memory = memoryview(bytearray(len(data)))
    ears = Ear(), Ear(memory)
    format = wire_format(block_mac)
    one, two = (keeper(node, ear, format, stack) for node, ear in enumerate(ears))
    proxy = Proxy(two.address)
    stack.callback(proxy.close)
    proxy.alter = lambda piece: piece.replace(data, forgery)
    link(one, two, proxy.address)
    ears[0].hears("up")
    done: queue.Queue[str | None] = queue.Queue()
    assert one.send_block(1, span_of(data), memoryview(data), done.put)
    said = done.get(timeout=LIMIT_S)
    if block_mac == "on":
        assert said is not None and "it arrived damaged every time" in said
        assert two.counts()["blocks damaged"] == MAX_TRIES and ears[1].blocks.empty()
    else:
        assert said is None and bytes(memory) == forgery
        assert ears[1].blocks.get(timeout=LIMIT_S) == (span_of(data), checksum(data))


STATE = b"weights that nobody else is to see: " * 20_000  # more than is encrypted at once
SAID = "a word that nobody else is to read"


@pytest.mark.parametrize("encrypt", [True, False])
def test_nothing_of_a_state_can_be_read_where_it_is_encrypted(
    encrypt: bool, stack: ExitStack
) -> None:
    """All that crosses, in both directions; where it is not encrypted it is all there."""
    memories = [memoryview(bytearray(len(STATE))) for _ in range(2)]
    ears = [Ear(memory) for memory in memories]
    format = wire_format("auto", encrypt)
    one, two = (keeper(node, ear, format, stack) for node, ear in enumerate(ears))
    proxy = Proxy(two.address)
    stack.callback(proxy.close)
    heard: dict[int, bytearray] = defaultdict(bytearray)

    def listen(piece: bytes) -> bytes:
        heard[threading.get_ident()] += piece  # a thread for each direction of a connection
        return piece

    proxy.alter = listen
    link(one, two, proxy.address)
    done: queue.Queue[str | None] = queue.Queue()
    for peers, other in ((one, 1), (two, 0)):
        assert peers.send(other, CopyDeclined(1, 0, STAMP, SAID))
        assert peers.send_block(other, span_of(STATE), memoryview(STATE), done.put)
    assert [done.get(timeout=LIMIT_S) for _ in range(2)] == [None, None]
    for ear, memory in zip(ears, memories, strict=True):
        assert ear.messages.get(timeout=LIMIT_S) == CopyDeclined(1, 0, STAMP, SAID)
        assert memory == STATE
    sums = checksum(STATE).to_bytes(8, "little")
    found = [
        sum(what in stream for stream in heard.values())
        for what in (STATE, STATE[:64], SAID.encode(), sums, b"mesh_version")
    ]
    assert found == [0 if encrypt else 2] * 5


def test_no_byte_of_an_encrypted_block_may_change(stack: ExitStack) -> None:
    """Its frame: the connection ends and the block comes again. Its bytes, or the tag behind them:
    it is refused, and comes again."""
    data = random.Random(2).randbytes(600 * KIB)
    for at in [0, 30, 45, 100, 120, 133, 5_000, len(data) + 130, len(data) + 133 + 15]:
        memory = memoryview(bytearray(len(data)))
        ears = Ear(), Ear(memory)
        format = wire_format("auto", encrypt=True)
        one, two = (keeper(node, ear, format, stack) for node, ear in enumerate(ears))
        proxy = Proxy(two.address)
        stack.callback(proxy.close)
        link(one, two, proxy.address)
        for ear in ears:
            ear.hears("up")
        assert one.send(1, RanksEnded(1)) and ears[1].messages.get(timeout=LIMIT_S)
        proxy.alter = _ChangesOne(at)
        done: queue.Queue[str | None] = queue.Queue()
        assert one.send_block(1, span_of(data), memoryview(data), done.put)
        assert done.get(timeout=LIMIT_S) is None and memory == data, at
        counts = two.counts()
        # Another stream may just be knocking: then it is that which has changed.
        refused = ("refused damaged", "refused wrong_secret", "refused forgotten")
        noticed = ("blocks damaged", *refused)
        assert sum(counts.get(name, 0) for name in noticed) == 1, (at, counts)


class _ChangesOne:
    """Flips a bit of the byte `at` of the first stream that is longer than a signal."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._stream: int | None = None
        self._seen_bytes = 0

    def __call__(self, piece: bytes) -> bytes:
        if self._stream is None and len(piece) > 100:
            self._stream = threading.get_ident()
        if self._stream != threading.get_ident():
            return piece
        at = self._at - self._seen_bytes
        self._seen_bytes += len(piece)
        if not 0 <= at < len(piece):
            return piece
        return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]


@pytest.mark.parametrize("encrypts", [0, 1])
def test_who_alone_encrypts_is_linked_with_nobody(encrypts: int, stack: ExitStack) -> None:
    """And who has dialled is told which setting it is; nothing was said."""
    ears = Ear(), Ear()
    formats = [wire_format("auto", encrypt=node == encrypts) for node in range(2)]
    one, two = (keeper(node, ear, formats[node], stack, IMPATIENT) for node, ear in enumerate(ears))
    two.connect(0, one.address)
    one.connect(1, two.address)
    _, node, why = ears[0].hears("dead")
    assert node == 1 and "`encrypt` is" in why and "set it on every node or on none" in why
    assert two.counts()["refused encryption"] > 0
    assert one.counts()["refused by peer encryption"] > 0


def keeper(
    node: int,
    ear: Ear,
    format: WireFormat,
    stack: ExitStack,
    timeouts: LinkTimeouts = PATIENT,
) -> Peers:
    options = LinkOptions(hashing=HASHING, timeouts=timeouts, format=format)
    me = Identity(JOB, node, 1)
    peers = Peers(lambda shell: new_link_table(me, SECRET, ear, shell, options), PeerOptions())
    stack.callback(peers.close)
    return peers
