"""Records: what is changed, repeated or left out on the way is refused, and so is what claims more
than there can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.coding.aes_gcm import AesGcm
from keepstep.core.wire.macs import hmac_sha256
from keepstep.core.wire.records import MAX_OUT, BuffersOut, Records
from keepstep.core.wire.seals import Encrypted, Seal, Signed
from keepstep.model.buffers import (
    BUFFER_BYTES,
    MAX_OFFER_BYTES,
    BufferOffer,
    BufferRecord,
    RecordKind,
)
from keepstep.model.wire import Refusal, Refused

OFFER = BufferOffer(4096, 1000, 3, b"an agent")


def signed(key: bytes) -> Seal:
    return Signed(hmac_sha256(key * 32))


def encrypted(key: bytes) -> Seal:
    return Encrypted(AesGcm(key * 32))


@pytest.fixture(params=[signed, encrypted])
def ends(request: pytest.FixtureRequest) -> tuple[Records, Records]:
    new = request.param
    return Records(new(b"a"), new(b"b")), Records(new(b"b"), new(b"a"))


def reason(heard: object) -> Refusal:
    assert isinstance(heard, Refused), heard
    return heard.reason


def test_what_is_said_is_heard(ends: tuple[Records, Records]) -> None:
    one, two = ends
    said = [
        BufferRecord(RecordKind.INLINE, 7),
        BufferRecord(RecordKind.BUFFER, 8, 2),
        BufferRecord(RecordKind.FREED, 1),
        BufferRecord(RecordKind.READY),
    ]
    assert [two.hear(one.say(record)) for record in said] == said
    body = OFFER.to_bytes()
    sealed = one.say(BufferRecord(RecordKind.OFFER, len(body)), body)
    head, rest = sealed[: two.head_bytes], sealed[two.head_bytes :]
    assert two.hear(head) == BufferRecord(RecordKind.OFFER, len(body))
    assert len(rest) == len(body) + two.seal_bytes and two.hear_offer(rest) == OFFER


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7), new=st.sampled_from([signed, encrypted]))
def test_any_bit_that_changes_is_found(at: int, bit: int, new: object) -> None:
    assert callable(new)
    one, two = Records(new(b"a"), new(b"b")), Records(new(b"b"), new(b"a"))
    body = OFFER.to_bytes()
    sealed = bytearray(one.say(BufferRecord(RecordKind.OFFER, len(body)), body))
    sealed[at % len(sealed)] ^= 1 << bit
    heard = two.hear(bytes(sealed[: two.head_bytes]))
    if not isinstance(heard, Refused):
        heard = two.hear_offer(bytes(sealed[two.head_bytes :]))
    assert reason(heard) is Refusal.DAMAGED


def test_none_is_repeated_left_out_or_sent_back(ends: tuple[Records, Records]) -> None:
    one, two = ends
    first, second = (one.say(BufferRecord(RecordKind.FREED, 1)) for _ in range(2))
    not_next = {Refusal.DAMAGED, Refusal.OUT_OF_ORDER}  # a cipher closes for the place alone
    assert reason(two.hear(second)) in not_next, "left out"
    assert two.hear(first) == BufferRecord(RecordKind.FREED, 1)
    assert reason(two.hear(first)) in not_next, "repeated"
    assert reason(one.hear(first)) is Refusal.DAMAGED, "sent back"


def test_nothing_is_held_for_an_offer_of_any_size(ends: tuple[Records, Records]) -> None:
    one, two = ends
    for length in (0, MAX_OFFER_BYTES + 1, (1 << 32) - 1):
        two = Records(two._ours, two._theirs)
        two._heard = one._said
        said = one.say(BufferRecord(RecordKind.OFFER, length))
        assert reason(two.hear(said)) is Refusal.OVERSIZED


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        OFFER.to_bytes()[:16],
        BufferOffer(1, 0, 3, b"a").to_bytes(),
        BufferOffer(1, 3, 0, b"a").to_bytes(),
        BufferOffer((1 << 64) - 5, 3, 3, b"a").to_bytes(),
    ],
)
def test_what_is_no_offer_is_none(data: bytes) -> None:
    assert BufferOffer.from_bytes(data) is None


def test_only_what_lies_in_an_offer_is_read_and_no_more_than_fits_here() -> None:
    large = BufferOffer(0, 2 * BUFFER_BYTES, 2, b"a")
    for offer, length, buffer, is_in in [
        (OFFER, 1000, 2, True),
        (OFFER, 1001, 2, False),
        (OFFER, 1, 3, False),
        (OFFER, 0, 0, False),
        (large, BUFFER_BYTES, 1, True),
        (large, BUFFER_BYTES + 1, 1, False),
    ]:
        assert offer.holds(BufferRecord(RecordKind.BUFFER, length, buffer)) == is_in


def test_buffers_are_free_in_the_order_in_which_they_were_filled() -> None:
    out = BuffersOut()
    for buffer in range(MAX_OUT):
        assert out.has_room
        out.add(buffer + 10, 100)
    assert not out.has_room and (out.nbytes, out.done) == (100 * MAX_OUT, 0)
    assert out.freed(2) == [10, 11] and out.has_room
    assert (out.nbytes, out.done) == (100 * (MAX_OUT - 2), 200)
    assert out.freed(0) is None and out.freed(MAX_OUT) is None, "nobody frees what is not out"
    assert out.drop() == [12, 13] and out.nbytes == 0 and out.done == 200
