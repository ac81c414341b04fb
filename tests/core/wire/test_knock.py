"""Knocks: under the job's secret and this connection's challenge, or nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.connection import MAGIC, VERSION
from keepstep.core.wire.knock import CHALLENGE_BYTES, Knock, Knocker, knock_key
from keepstep.model.wire import Refusal, Refused

KEY = knock_key(b"the job's secret, 32 bytes long.")
CHALLENGES = st.binary(min_size=CHALLENGE_BYTES, max_size=CHALLENGE_BYTES)
SIZES = st.lists(st.integers(1, 9), min_size=26, max_size=26)


def said_to(challenge: bytes, key: bytes = KEY) -> bytes:
    """All that a dialler says to that challenge."""
    knocker = Knocker(key)
    answer = knocker.receive(Knock(KEY, challenge).opening)
    assert isinstance(answer, bytes) and not knocker.wanted
    return knocker.opening + answer


def heard(challenge: bytes, said: bytes, sizes: list[int] | None = None) -> Knock | Refused:
    knock = Knock(KEY, challenge)
    at = 0
    for size in sizes or [26] * 26:
        if at == len(said) or knock.is_right:
            break
        piece = said[at : at + min(size, knock.wanted)]
        at += len(piece)
        if refused := knock.receive(piece):
            return refused
    return knock


@given(CHALLENGES, SIZES)
def test_who_knows_the_secret_is_let_in_however_its_bytes_come(
    challenge: bytes, sizes: list[int]
) -> None:
    knock = heard(challenge, said_to(challenge), sizes)
    assert isinstance(knock, Knock) and knock.is_right


@given(CHALLENGES, CHALLENGES)
def test_what_was_right_for_one_connection_is_wrong_for_another(one: bytes, other: bytes) -> None:
    found = heard(other, said_to(one))
    if one != other:
        assert isinstance(found, Refused) and found.reason is Refusal.WRONG_SECRET


@given(CHALLENGES, st.integers(0, 26 * 8 - 1))
def test_no_bit_may_differ(challenge: bytes, bit: int) -> None:
    said = bytearray(said_to(challenge))
    said[bit // 8] ^= 1 << bit % 8
    assert isinstance(heard(challenge, bytes(said)), Refused)


@given(CHALLENGES, st.integers(0, 25))
def test_what_ends_early_is_never_right(challenge: bytes, until: int) -> None:
    knock = heard(challenge, said_to(challenge)[:until])
    assert isinstance(knock, Knock) and not knock.is_right


def test_another_secret_is_wrong() -> None:
    challenge = bytes(CHALLENGE_BYTES)
    found = heard(challenge, said_to(challenge, knock_key(b"another secret, also 32 bytes...")))
    assert isinstance(found, Refused) and found.reason is Refusal.WRONG_SECRET


def test_another_version_is_named_on_both_sides_before_a_key_is_used() -> None:
    other = MAGIC + (VERSION - 1).to_bytes(2, "little")
    found = heard(bytes(CHALLENGE_BYTES), other)
    assert isinstance(found, Refused) and found.reason is Refusal.VERSION
    answer = Knocker(KEY).receive(other + bytes(CHALLENGE_BYTES))
    assert isinstance(answer, Refused) and answer.reason is Refusal.VERSION


@given(st.binary(min_size=26, max_size=26))
def test_a_dialler_answers_no_stranger(said: bytes) -> None:
    answer = Knocker(KEY).receive(said)
    assert said.startswith(MAGIC) or isinstance(answer, Refused)
