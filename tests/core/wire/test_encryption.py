"""Encrypted connections: nothing of what crosses can be read or moved, and nobody sends readable
bytes where encryption is asked for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from keepstep.coding.aes_gcm import AesGcm
from keepstep.core.wire import connection as wire
from keepstep.core.wire.connection import KEEPERS_FORMAT, WireFormat
from keepstep.model.messages.peers import LinkGoodbye, RanksEnded
from keepstep.model.wire import (
    BlockComing,
    BlockDamaged,
    BlockWhole,
    Opened,
    Refusal,
    Refused,
    Signal,
    Signalled,
)
from tests.core.wire.test_connection import (
    BOTH_FORMATS,
    ENCRYPTS,
    HEAD,
    NEEDS,
    SIGNS,
    acceptor,
    dialer,
    feed,
    flip,
    given_out,
    header,
    meet,
    pair,
    play,
    refusals,
)

WORDS = b"nobody else is to read this: " * 20
BODY = wire._BLOCK.size + 16


@BOTH_FORMATS
def test_what_crosses_can_be_read_only_when_it_is_not_encrypted(format: WireFormat) -> None:
    """Messages, signals, and of a block its bytes, its place and its checksum."""
    one, _ = pair(format=format)
    head = header(WORDS)
    message = one.message(LinkGoodbye(WORDS.decode()[:100]))
    signal = one.signal(Signal.CONFIRMED, 0x0102030405060708)
    block = given_out(one, head, WORDS)
    told = [
        WORDS[:100] in message,
        bytes([8, 7, 6, 5, 4, 3, 2, 1]) in signal,
        WORDS in block,
        head.checksum.to_bytes(8, "little") in block,
        head.span.offset.to_bytes(8, "little") in block,
    ]
    assert told == [format is KEEPERS_FORMAT] * len(told)


def test_the_same_never_crosses_as_the_same() -> None:
    """Each direction has a key of its own, each frame and block a nonce of its own."""
    ends = [*pair(format=ENCRYPTS), *pair(seed=1, format=ENCRYPTS)]
    crossed = [given_out(end, header(WORDS), WORDS) for end in ends for _ in range(3)]
    for region in (slice(0, HEAD), slice(HEAD, HEAD + BODY), slice(HEAD + BODY, -16)):
        pieces = [one[region] for one in crossed]
        assert len(set(pieces)) == len(pieces)
    assert len({one[-16:] for one in crossed}) == len(crossed)


def test_no_nonce_comes_twice_under_one_key() -> None:
    """Whatever is sent, and in which order."""
    used: list[tuple[bytes, bytes]] = []

    class Noted(AesGcm):
        def __init__(self, key: bytes) -> None:
            super().__init__(key)
            self.key = key

        def seal(self, nonce: bytes, data: bytes, beside: bytes) -> bytes:
            used.append((self.key, nonce))
            return super().seal(nonce, data, beside)

        def begin_sealing(self, nonce: bytes, beside: bytes):  # type: ignore[no-untyped-def]
            used.append((self.key, nonce))
            return super().begin_sealing(nonce, beside)

    rng = random.Random(5)
    items = [RanksEnded(1), b"a block", Signalled(Signal.PING, 0)]
    for seed in range(3):
        for end in pair(seed, replace(KEEPERS_FORMAT, new_cipher=Noted)):
            play(end, rng.choices(items, k=100))
    assert len(set(used)) == len(used) > 900
    assert len({key for key, _ in used}) == 6


def test_a_change_anywhere_in_a_block_is_refused() -> None:
    """Each byte of its head, of its header, of its bytes and of their tag."""
    size = HEAD + BODY + 40 + 16
    for at in range(size):
        one, two = pair(format=ENCRYPTS)
        frame = given_out(one, header(WORDS[:40]), WORDS[:40])
        assert len(frame) == size
        events = feed(two, flip(frame, 8 * at + at % 8))
        if at < HEAD + BODY:
            assert two.closed is not None and two.closed.reason is Refusal.DAMAGED
            assert events == [two.closed]
        else:
            assert isinstance(events[0], BlockComing) and isinstance(events[-1], BlockDamaged)


def test_a_block_s_bytes_belong_to_its_header() -> None:
    """Two blocks of one length whose bytes change places, tags and all, are both refused."""
    one, two = pair(format=ENCRYPTS)
    first, second = (given_out(one, header(data), data) for data in (b"first!", b"second"))
    at = HEAD + BODY
    events = feed(two, first[:at] + second[at:] + second[:at] + first[at:])
    assert [type(e) for e in events if not isinstance(e, bytes)] == [
        *(BlockComing, BlockDamaged) * 2
    ]


def test_who_asks_again_gets_another_key() -> None:
    """What was heard of one connection says nothing on the next one, though the secret is the
    same."""
    one, two = pair(format=ENCRYPTS)
    frames = play(one, [b"a block", RanksEnded(1)]).frames
    assert isinstance(feed(two, b"".join(frames))[2], BlockWhole)
    _, again = pair(seed=3, format=ENCRYPTS)
    (refused,) = feed(again, b"".join(frames))
    assert isinstance(refused, Refused) and refused.reason is Refusal.DAMAGED


# one side encrypts and the other does not


@pytest.mark.parametrize("plain", [KEEPERS_FORMAT, SIGNS, NEEDS])
@pytest.mark.parametrize("is_dialer", [True, False])
def test_a_mismatch_is_refused_and_names_the_setting(plain: WireFormat, is_dialer: bool) -> None:
    ones, twos = (ENCRYPTS, plain) if is_dialer else (plain, ENCRYPTS)
    told, refused = refusals(dialer(format=ones), acceptor(format=twos))
    assert told.reason is refused.reason is Refusal.ENCRYPTION
    assert told.by_peer and not refused.by_peer
    here, there = ("off", "on") if is_dialer else ("on", "off")
    assert refused.why == (
        f"`encrypt` is {here} on this node and {there} on node 1: set it on every node or on none"
    )
    assert told.why == (
        f"`encrypt` is {there} on this node and {here} on the other one: set it on every node or "
        "on none"
    )


@pytest.mark.parametrize("ours", [KEEPERS_FORMAT, ENCRYPTS])
def test_who_dials_checks_it_too(ours: WireFormat) -> None:
    """An acceptor that took what it should not have taken, or that somebody speaks for."""
    theirs = ENCRYPTS if ours is KEEPERS_FORMAT else KEEPERS_FORMAT
    one, careless = dialer(format=ours), acceptor(format=theirs)
    hello = one.take()
    flags = len(wire.MAGIC) + 2 + 1
    feed(careless, hello[:flags] + bytes([hello[flags] ^ wire._ENCRYPTS]) + hello[flags + 1 :])
    (refused,) = feed(one, careless.take())
    assert isinstance(refused, Refused) and refused.reason is Refusal.ENCRYPTION
    assert not refused.by_peer and "`encrypt` is" in refused.why


def test_nobody_on_the_way_can_talk_them_out_of_it() -> None:
    """To each its own flag is shown back, as if the other side did as well: the proofs differ."""
    flags = len(wire.MAGIC) + 2 + 1

    def turned(record: bytes) -> bytes:
        return record[:flags] + bytes([record[flags] ^ wire._ENCRYPTS]) + record[flags + 1 :]

    one, two = dialer(format=ENCRYPTS), acceptor()
    ones, twos = meet(one, two, {0: turned, 1: turned})
    assert not [e for e in ones + twos if isinstance(e, Opened)]
    assert twos[-1].reason is Refusal.WRONG_SECRET
