"""The wire under strangers, liars, damage, replay and every way a stream can be cut into pieces. No
sockets: bytes in, events out."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.coding.aes_gcm import AesGcm
from keepstep.coding.checksum import checksum
from keepstep.core.wire import connection as wire
from keepstep.core.wire.codec import MAX_MESSAGE_BYTES
from keepstep.core.wire.connection import KEEPERS_FORMAT, MAGIC, Connection, WireFormat
from keepstep.core.wire.macs import TAG_BYTES
from keepstep.core.wire.messages import encode
from keepstep.model.messages.peers import (
    CopyAcked,
    HorizonWord,
    KeeperMessage,
    LinkGoodbye,
    RanksEnded,
)
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import (
    MAX_BLOCK_BYTES,
    BlockComing,
    BlockDamaged,
    BlockHeader,
    BlockWhole,
    Dial,
    Identity,
    Opened,
    Part,
    Received,
    Refusal,
    Refused,
    Signal,
    Signalled,
    Span,
    WireEvent,
)
from keepstep.sim.protocol.wire.light import wire_format

JOB, SECRET = b"j" * 16, b"the job's secret, 32 bytes long."
ONE, TWO = Identity(JOB, 1, 4), Identity(JOB, 2, 7)
DIAL = Dial(link=99, channel=3, resuming=True)
RECORD = 84  # a handshake record with its greeting
HEAD = 40


def everybody(peer: Identity, dial: Dial) -> None:
    return None


def nonce(seed: int) -> bytes:
    return random.Random(seed).randbytes(32)


ENCRYPTS = replace(KEEPERS_FORMAT, new_cipher=AesGcm)
BOTH_FORMATS = pytest.mark.parametrize(
    "format", [KEEPERS_FORMAT, ENCRYPTS], ids=["signed", "encrypted"]
)


def dialer(
    me: Identity = ONE,
    secret: bytes = SECRET,
    dial: Dial = DIAL,
    seed: int = 1,
    format: WireFormat = KEEPERS_FORMAT,
) -> Connection:
    return Connection(me, secret, nonce(seed), everybody, dial, format)


def acceptor(
    me: Identity = TWO,
    secret: bytes = SECRET,
    admit: wire.Admit = everybody,
    seed: int = 2,
    format: WireFormat = KEEPERS_FORMAT,
) -> Connection:
    return Connection(me, secret, nonce(seed), admit, format=format)


def feed(
    end: Connection, stream: bytes, sizes: Iterable[int] = itertools.repeat(1 << 20)
) -> list[WireEvent | bytes]:
    """Give an end the stream in pieces of these sizes. Its events, and behind each BlockComing the
    bytes that came."""
    events: list[WireEvent | bytes] = []
    at, sizes = 0, iter(sizes)
    block, length = bytearray(), 0
    while at < len(stream):
        size = next(sizes, 1)
        if length:
            piece = stream[at : at + min(size, length - len(block))]
            block += piece
            if len(block) == length:
                events += taken(end, block)
                block, length = bytearray(), 0
        elif end.wanted:
            piece = stream[at : at + min(size, end.wanted)]
            event = end.receive(piece)
            assert end.wanted <= MAX_MESSAGE_BYTES + 16, (
                "an end must not wait for, or allocate, what anybody claims"
            )
            if event:
                events.append(event)
            if isinstance(event, BlockComing):
                length = event.header.span.length + (TAG_BYTES if end.unsealing else 0)
        else:
            assert end.closed, "an open end wants more"
            break
        at += len(piece)
    return events


def taken(end: Connection, came: bytes | bytearray) -> list[WireEvent | bytes]:
    """A block's bytes, as they were sent, and what the end says of them."""
    if end.unsealing is None:
        return [bytes(came), end.block_received(checksum(came))]
    sealed = memoryview(came)[:-TAG_BYTES]
    data = bytearray(len(sealed))
    end.unsealing.update(sealed, memoryview(data))
    return [bytes(data), end.block_received(checksum(data), bytes(came[-TAG_BYTES:]))]


def given_out(end: Connection, head: BlockHeader, data: bytes) -> bytes:
    """A block, as it crosses."""
    frame = end.block(head, memoryview(data))
    if end.sealing is None:
        return frame + data
    sealed = bytearray(len(data))
    end.sealing.update(memoryview(data), memoryview(sealed))
    return frame + sealed + end.sealing.tag()


Alter = Callable[[bytes], bytes]


def meet(
    one: Connection, two: Connection, alter: dict[int, Alter] | None = None
) -> tuple[list[Any], list[Any]]:
    """Carry the handshake's records between dialer and acceptor, some altered (numbered as they
    cross). The events of both."""
    seen: tuple[list[Any], list[Any]] = ([], [])
    crossed = 0
    while True:
        moved = False
        for index, (sender, receiver) in enumerate([(one, two), (two, one)]):
            if out := sender.take():
                assert len(out) == RECORD
                if receiver.wanted:
                    seen[1 - index].extend(feed(receiver, (alter or {}).get(crossed, bytes)(out)))
                crossed, moved = crossed + 1, True
        if not moved:
            return seen


def pair(seed: int = 0, format: WireFormat = KEEPERS_FORMAT) -> tuple[Connection, Connection]:
    one, two = dialer(seed=2 * seed + 1, format=format), acceptor(seed=2 * seed + 2, format=format)
    assert meet(one, two) == ([Opened(TWO, DIAL)], [Opened(ONE, DIAL)])
    return one, two


def header(data: bytes, number: int = 1, **changes: Any) -> BlockHeader:
    span = Span(rank=3, stamp=Stamp(17, 2), part=Part.PAYLOAD, offset=1 << 40, length=len(data))
    return BlockHeader(span._replace(**changes), checksum(data), number)


def flip(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


@dataclass
class Script:
    """What one end sends, and what the other must see of it."""

    frames: list[bytes]
    events: list[WireEvent | bytes]


Item = KeeperMessage | Signalled | bytes


def play(end: Connection, items: Iterable[Item]) -> Script:
    script = Script([], [])
    for number, item in enumerate(items, 1):
        if isinstance(item, Signalled):
            script.frames.append(end.signal(item.signal, item.number))
            script.events.append(item)
        elif isinstance(item, bytes):
            head = header(item, number)
            script.frames.append(given_out(end, head, item))
            script.events += [BlockComing(head), item, BlockWhole(head)]
        else:
            script.frames.append(end.message(item, number))
            script.events.append(Received(item, number))
    return script


ENDS = st.integers(0, 1 << 62).map(RanksEnded) | st.just(LinkGoodbye("enough"))
ACKS = st.builds(
    lambda r, s: CopyAcked(1, r, Stamp(s, 1)),
    st.integers(0, 1 << 31),
    st.integers(-1, 1 << 40),
)
SIGNALS = st.builds(Signalled, st.sampled_from(Signal), st.integers(0, (1 << 64) - 1))
ITEMS = st.lists(ENDS | ACKS | SIGNALS | st.binary(min_size=1, max_size=300), max_size=8)


# two keepers of one job


def test_both_sides_learn_who_is_there_and_what_for() -> None:
    one, two = pair()
    assert one.closed is None and two.closed is None


@BOTH_FORMATS
@given(there=ITEMS, back=ITEMS)
def test_what_is_sent_is_what_arrives_both_ways(
    format: WireFormat, there: list[Item], back: list[Item]
) -> None:
    one, two = pair(format=format)
    forth, reply = play(one, there), play(two, back)
    assert feed(two, b"".join(forth.frames)) == forth.events
    assert feed(one, b"".join(reply.frames)) == reply.events


@BOTH_FORMATS
@given(items=ITEMS, sizes=st.lists(st.integers(1, 200)), until=st.integers(0, 10_000))
def test_how_the_stream_is_cut_into_pieces_changes_nothing(
    format: WireFormat, items: list[Item], sizes: list[int], until: int
) -> None:
    """And a stream that ends early gives the first of the events, none other."""
    one, two = dialer(format=format), acceptor(format=format)
    hello, answer = one.take(), acceptor(format=format)
    feed(answer, hello)
    feed(one, answer.take())
    proof = one.take()
    feed(answer, proof)
    feed(one, answer.take())
    script = play(one, items)
    stream = hello + proof + b"".join(script.frames)
    whole: list[Any] = [Opened(ONE, DIAL), *script.events]
    # what two answers is never looked at: its nonce is that of `answer`
    assert feed(two, stream, sizes) == whole
    early = feed(acceptor(format=format), stream[:until], sizes)
    assert early == whole[: len(early)]


@BOTH_FORMATS
@given(items=ITEMS, sizes=st.lists(st.integers(1, 400), min_size=1))
def test_what_is_read_ahead_is_never_a_blocks_own(
    format: WireFormat, items: list[Item], sizes: list[int]
) -> None:
    """Whoever receives as much as `readable` says, and hands it in at once, sees the same; and the
    bytes of a block, which go elsewhere, are never among it."""
    one, two = pair(format=format)
    script = play(one, items)
    stream, at, events = b"".join(script.frames), 0, []
    size = itertools.cycle(sizes)
    while at < len(stream):
        piece = memoryview(stream)[at : at + min(next(size), two.readable)]
        at += len(piece)
        done = 0
        while done < len(piece):
            event, done = two.read(piece, done)
            if event is not None:
                events.append(event)
            if isinstance(event, BlockComing):
                assert done == len(piece)
                block = stream[at : at + event.header.span.length]
                block += stream[at + len(block) :][: TAG_BYTES if two.unsealing else 0]
                events += taken(two, block)
                at += len(block)
    assert events == script.events


# blocks under MACs

SIGNS = wire_format(checks=True, signs=True)
NEEDS = replace(SIGNS, needs_block_mac=True)


def signing_pair(one: WireFormat, two: WireFormat) -> tuple[Connection, Connection]:
    dialer = Connection(ONE, SECRET, nonce(1), everybody, DIAL, one)
    return dialer, Connection(TWO, SECRET, nonce(2), everybody, format=two)


def arrive(end: Connection, frame: bytes, data: bytes, found: int) -> WireEvent:
    """A block's header, then its bytes, however they were altered."""
    at = 0
    while end.wanted:
        event, at = end.read(memoryview(frame), at)
    assert isinstance(event, BlockComing)
    mac = end.begin_block_mac()
    if mac is None:
        return end.block_received(found)
    mac.update(memoryview(data))
    return end.block_received(found, mac.tag())


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=6), st.data())
def test_bytes_rewritten_under_the_same_checksum_are_found(
    blocks: list[bytes], data: st.DataObject
) -> None:
    """XXH3 has no key: who looks for another block with the same checksum finds one."""
    one, two = signing_pair(SIGNS, NEEDS)
    meet(one, two)
    for number, block in enumerate(blocks):
        head = header(block, number)
        frame = one.block(head, memoryview(block))
        came = data.draw(st.just(block) | st.sampled_from(blocks) | st.binary(min_size=1))
        event = arrive(two, frame, came, found=head.checksum)
        assert isinstance(event, BlockWhole if came == block else BlockDamaged)


def test_without_macs_only_the_checksum_tells() -> None:
    for ours, theirs in [(SIGNS, KEEPERS_FORMAT), (KEEPERS_FORMAT, SIGNS)]:
        one, two = signing_pair(ours, theirs)
        meet(one, two)
        head = header(b"four")
        event = arrive(two, one.block(head, memoryview(b"four")), b"five", head.checksum)
        assert event == BlockWhole(head)


def test_a_block_s_mac_is_of_its_place_and_direction() -> None:
    """What was sent once proves nothing later, nor on the way back."""
    one, two = signing_pair(SIGNS, SIGNS)
    meet(one, two)
    head = header(b"four")
    tags = set()
    for end in (one, one, two):
        frame = end.block(head, memoryview(b"four"))
        tags.add(frame[-32:-16])
    assert len(tags) == 3


@pytest.mark.parametrize("formats", [(NEEDS, KEEPERS_FORMAT), (KEEPERS_FORMAT, NEEDS)])
def test_who_needs_macs_refuses_who_has_none(formats: tuple[WireFormat, WireFormat]) -> None:
    one, two = signing_pair(*formats)
    ones, twos = refusals(one, two)
    assert {ones.reason, twos.reason} == {Refusal.UNSIGNED} and ones.by_peer != twos.by_peer


# strangers and liars


def refusals(one: Connection, two: Connection, **how: Any) -> tuple[Refused, Refused]:
    """Neither side opens; the last word of each."""
    ones, twos = meet(one, two, **how)
    assert not [e for e in ones + twos if isinstance(e, Opened)]
    return ones[-1], twos[-1]


def test_wrong_secret() -> None:
    told, refused = refusals(dialer(secret=b"another secret, also 32 bytes..."), acceptor())
    assert (refused.reason, refused.by_peer) == (Refusal.WRONG_SECRET, False)
    assert (told.reason, told.by_peer) == (Refusal.WRONG_SECRET, True)


def test_wrong_job() -> None:
    told, refused = refusals(dialer(replace(ONE, job_hash=b"k" * 16)), acceptor())
    assert refused.reason == told.reason == Refusal.WRONG_JOB


def test_who_is_not_admitted_is_told_why() -> None:
    def none_before_five(peer: Identity, dial: Dial) -> Refused | None:
        assert dial == DIAL
        return (
            None
            if peer.incarnation >= 5
            else Refused(
                Refusal.OLD_INCARNATION, f"expected incarnation 5, found {peer.incarnation}"
            )
        )

    told, refused = refusals(dialer(), acceptor(admit=none_before_five))
    assert refused == Refused(Refusal.OLD_INCARNATION, "expected incarnation 5, found 4")
    assert (told.reason, told.by_peer) == (Refusal.OLD_INCARNATION, True)
    assert meet(dialer(replace(ONE, incarnation=5)), acceptor(admit=none_before_five))[0] == [
        Opened(TWO, DIAL)
    ]


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "VERSION", wire.VERSION + 1)
    newer = dialer()
    hello = newer.take()
    monkeypatch.undo()
    old, version = acceptor(), wire.VERSION
    expected = f"expected version {version}, found {version + 1}"
    assert feed(old, hello) == [Refused(Refusal.VERSION, expected)]
    monkeypatch.setattr(wire, "VERSION", version + 1)
    expected = f"expected version {version + 1}, found {version}"
    assert feed(newer, old.take()) == [Refused(Refusal.VERSION, expected)]


@pytest.mark.parametrize(
    "says",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03",
        b"\0" * 10,
        b"SSH-2.0-OpenSSH_9.6",
    ],
)
def test_who_speaks_another_protocol_is_refused_by_its_first_bytes(says: bytes) -> None:
    (refused,) = feed(acceptor(), says)
    assert isinstance(refused, Refused) and refused.reason is Refusal.STRANGER


def test_a_connection_to_itself_is_refused() -> None:
    """Linux connects a socket to itself when it dials an ephemeral port nobody listens on."""
    one = dialer()
    (refused,) = feed(one, one.take())
    assert isinstance(refused, Refused) and refused.reason is Refusal.MALFORMED


def test_a_recorded_session_opens_nothing_twice() -> None:
    one, two = dialer(), acceptor()
    hello = one.take()
    feed(two, hello)
    feed(one, two.take())
    proof = one.take()
    assert feed(two, proof) == [Opened(ONE, DIAL)]
    again = acceptor(seed=77)
    assert [e.reason for e in feed(again, hello + proof) if isinstance(e, Refused)] == [
        Refusal.WRONG_SECRET
    ]


def test_an_own_proof_sent_back_proves_nothing() -> None:
    one, two = dialer(), acceptor()
    feed(two, one.take())
    feed(one, two.take())
    (refused,) = feed(one, one.take())
    assert isinstance(refused, Refused) and refused.reason is Refusal.WRONG_SECRET


@given(st.binary(max_size=400), st.booleans(), st.lists(st.integers(1, 50)))
def test_random_bytes_open_nothing(noise: bytes, greeted: bool, sizes: list[int]) -> None:
    stream = (MAGIC + b"\x02\0" if greeted else b"") + noise
    for end in (acceptor(), dialer()):
        assert all(isinstance(event, Refused) for event in feed(end, stream, sizes))


@BOTH_FORMATS
@given(noise=st.binary(min_size=HEAD, max_size=400), sizes=st.lists(st.integers(1, 50)))
def test_random_bytes_after_the_handshake_say_nothing(
    format: WireFormat, noise: bytes, sizes: list[int]
) -> None:
    _, two = pair(format=format)
    (refused,) = feed(two, noise, sizes)
    assert isinstance(refused, Refused) and refused.reason is Refusal.DAMAGED


@pytest.mark.parametrize(
    "record", range(4), ids=["hello", "answer", "the dialer's proof", "the acceptor's proof"]
)
@BOTH_FORMATS
def test_no_bit_of_the_handshake_may_change(record: int, format: WireFormat) -> None:
    """All 640 of each record. Whoever received the changed one does not open; before the last
    record nobody does."""
    for bit in range(8 * RECORD):
        ends = dialer(format=format), acceptor(format=format)
        ones, twos = meet(*ends, {record: lambda data, bit=bit: flip(data, bit)})  # type: ignore[misc]
        receiver = ones if record % 2 else twos
        assert not [e for e in receiver if isinstance(e, Opened)], f"bit {bit}"
        assert isinstance(receiver[-1], Refused), f"bit {bit}"
        assert record == 3 or not [e for e in ones + twos if isinstance(e, Opened)], f"bit {bit}"


# damage, replay, reordering


def session(seed: int, format: WireFormat) -> tuple[Connection, Script]:
    """An end that is to receive, and what it is sent: messages and blocks in a seeded order."""
    rng = random.Random(seed)
    one, two = pair(seed, format)
    items: list[Item] = [
        rng.randbytes(rng.randint(1, 200))
        if rng.random() < 0.5
        else RanksEnded(rng.randrange(1 << 60))
        for _ in range(6)
    ]
    return two, play(one, items)


@BOTH_FORMATS
def test_a_thousand_flipped_bits_are_found_and_none_is_delivered(format: WireFormat) -> None:
    rng = random.Random(20)
    caught = {Refused: 0, BlockDamaged: 0}
    for seed in range(1000):
        two, script = session(seed, format)
        stream = b"".join(script.frames)
        events = feed(two, flip(stream, rng.randrange(8 * len(stream))))
        harm = next(e for e in events if isinstance(e, (Refused, BlockDamaged)))
        at = events.index(harm)
        caught[type(harm)] += 1
        if isinstance(harm, BlockDamaged):
            # The bytes lie where the owner put them, marked damaged; everything else is as sent.
            assert (
                events[: at - 1] == script.events[: at - 1]
                and events[at + 1 :] == script.events[at + 1 :]
            )
            assert script.events[at] == BlockWhole(harm.header)
        else:
            assert harm.reason is Refusal.DAMAGED and two.closed == harm
            assert events[:-1] == script.events[: len(events) - 1]
    assert min(caught.values()) > 100, caught


@BOTH_FORMATS
@given(seed=st.integers(0, 50), take=st.integers(0, 5), put=st.integers(0, 5))
def test_frames_are_heard_once_and_in_order(
    format: WireFormat, seed: int, take: int, put: int
) -> None:
    """A frame that comes again, early or late ends the connection at the first one out of its
    place. One that is encrypted can be read at its place alone."""
    for repeated in (True, False):
        two, script = session(seed, format)
        frames = list(script.frames)
        moved = frames[take] if repeated else frames.pop(take)
        frames.insert(put, moved)
        events = feed(two, b"".join(frames))
        if frames == script.frames:
            assert events == script.events
        elif two.closed:
            expected = Refusal.OUT_OF_ORDER if format is KEEPERS_FORMAT else Refusal.DAMAGED
            assert two.closed.reason is expected
            assert events[:-1] == script.events[: len(events) - 1]
        else:
            raise AssertionError("a replayed or reordered frame was heard")


@BOTH_FORMATS
def test_an_own_frame_sent_back_says_nothing(format: WireFormat) -> None:
    one, _ = pair(format=format)
    (refused,) = feed(one, one.message(RanksEnded(1)))
    assert isinstance(refused, Refused) and refused.reason is Refusal.DAMAGED


@BOTH_FORMATS
def test_a_frame_of_another_session_says_nothing(format: WireFormat) -> None:
    one, _ = pair(seed=1, format=format)
    _, two = pair(seed=2, format=format)
    (refused,) = feed(two, one.message(RanksEnded(1)))
    assert isinstance(refused, Refused) and refused.reason is Refusal.DAMAGED


# somebody who knows the secret, but not the rules


@BOTH_FORMATS
def test_a_length_beyond_the_bound_is_refused_before_any_of_it_comes(format: WireFormat) -> None:
    one, two = pair(format=format)
    frame = one._frame(wire._MESSAGE_FRAME, b" " * (MAX_MESSAGE_BYTES + 1), 0)
    (refused,) = feed(two, frame[:HEAD])
    assert isinstance(refused, Refused) and refused.reason is Refusal.OVERSIZED and two.wanted == 0


FAR = Stamp(10**18, 10**6)


def test_the_longest_message_passes() -> None:
    one, two = pair()
    word = HorizonWord(1, 1, "auto", "", None, None, None, (), -1)
    each = len(encode(replace(word, alive=(FAR, FAR)))) - len(encode(replace(word, alive=(FAR,))))
    word = replace(word, alive=(FAR,) * ((MAX_MESSAGE_BYTES - 500) // each))
    longest = replace(word, why="x" * (MAX_MESSAGE_BYTES - len(encode(word))))
    assert len(encode(longest)) == MAX_MESSAGE_BYTES
    assert feed(two, one.message(longest, 5)) == [Received(longest, 5)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", Refusal.MALFORMED),
        (b"\xff\xfe", Refusal.MALFORMED),
        (b"[" * 100_000, Refusal.MALFORMED),
        (b"7" * 100_000, Refusal.MALFORMED),
        (b'["kind","ended"]', Refusal.MALFORMED),
        (b'{"kind":["ended"]}', Refusal.MALFORMED),
        (b'{"kind":"ended"}', Refusal.MALFORMED),
        (b'{"kind":"ended","mesh_version":true}', Refusal.MALFORMED),
        (b'{"kind":"ended","mesh_version":NaN}', Refusal.MALFORMED),
        (b'{"kind":"ended","mesh_version":-1}', Refusal.MALFORMED),
        (b'{"kind":"ended","mesh_version":1,"more":1}', Refusal.MALFORMED),
        (b'{"kind":"sing","mesh_version":1}', Refusal.UNKNOWN_KIND),
    ],
)
def test_a_message_nobody_understands_is_named_and_the_next_one_heard(
    body: bytes, reason: Refusal
) -> None:
    one, two = pair()
    ended = RanksEnded(3)
    refused, heard = feed(two, one._frame(wire._MESSAGE_FRAME, body, 8) + one.message(ended))
    assert isinstance(refused, Refused) and (refused.reason, refused.number) == (reason, 8)
    assert heard == Received(ended, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"length": 0}, Refusal.OVERSIZED),
        ({"length": MAX_BLOCK_BYTES + 1}, Refusal.OVERSIZED),
        ({"length": (1 << 64) - 1}, Refusal.OVERSIZED),
        ({"offset": (1 << 64) - 1}, Refusal.OVERSIZED),
        ({"part": 9}, Refusal.MALFORMED),
        ({"job": b"k" * 16}, Refusal.WRONG_JOB),
        ({"cut": 1}, Refusal.MALFORMED),
    ],
)
def test_a_block_header_that_cannot_be_ends_the_connection(
    change: dict[str, Any], reason: Refusal
) -> None:
    one, two = pair()
    fields: dict[str, Any] = {
        "job": JOB,
        "rank": 1,
        "part": 0,
        "step": 5,
        "epoch": 1,
        "offset": 0,
        "length": 10,
        "sum": 0,
        "tag": bytes(16),
    } | change
    cut = int(fields.pop("cut", 0))
    body = wire._BLOCK.pack(*fields.values())
    (refused,) = feed(two, one._frame(wire._BLOCK_FRAME, body[: len(body) - cut], 1) + bytes(20))
    assert isinstance(refused, Refused) and refused.reason is reason and two.closed == refused


def test_an_unknown_type_of_frame_ends_the_connection() -> None:
    one, two = pair()
    (refused,) = feed(two, one._frame(99, json.dumps({}).encode(), 1))
    assert isinstance(refused, Refused) and refused.reason is Refusal.UNKNOWN_KIND
