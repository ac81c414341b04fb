"""Digests: equal for equal bytes, wherever and in whatever parts they are added up; another one for
a bit, a swap, a shift or a tail that differs."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.edge.torch.digests import (
    LANES,
    WORD_BYTES,
    DigestPiece,
    digest_of,
    folded,
    keys_of,
    scratch_words,
)

WORDS = 64
KEYS = keys_of(b"a job", WORDS)


def in_integers(block: bytes) -> int:
    """The definition, with Python's own numbers."""
    padded = block + bytes(-len(block) % 4)
    words = [
        int.from_bytes(padded[at : at + 4], "little", signed=True)
        for at in range(0, len(padded), 4)
    ]
    found = 0
    for lane in KEYS.tolist():
        total = lane[-1] + sum(key * word for key, word in zip(lane, words, strict=False))
        found = found << 32 | total % 2**64 >> 32
    return found


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=WORDS * WORD_BYTES))
def test_it_is_what_its_definition_says(block: bytes) -> None:
    assert digest_of(block, KEYS) == in_integers(block)


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=WORDS * WORD_BYTES), st.data())
def test_a_flipped_bit_is_seen(block: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(block) - 1))
    other = bytearray(block)
    other[bit // 8] ^= 1 << bit % 8
    assert digest_of(bytes(other), KEYS) != digest_of(block, KEYS)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, WORDS - 2), st.integers(1, WORDS - 1))
def test_swapped_words_and_shifted_bytes_are_seen(seed: int, first: int, apart: int) -> None:
    block = random.Random(seed).randbytes(WORDS * WORD_BYTES)
    second = min(first + apart, WORDS - 1)
    words = [block[at : at + 4] for at in range(0, len(block), 4)]
    words[first], words[second] = words[second], words[first]
    whole = digest_of(block, KEYS)
    assert (digest_of(b"".join(words), KEYS) != whole) == (b"".join(words) != block)
    assert digest_of(block[1:] + block[:1], KEYS) != whole
    assert digest_of(bytes(4) + block[:-4], KEYS) != whole


@pytest.mark.parametrize("length", range(1, 9))
def test_a_tail_that_fills_no_word_counts(length: int) -> None:
    block = random.Random(length).randbytes(length)
    other = block[:-1] + bytes([block[-1] ^ 0x80])
    assert digest_of(block, KEYS) != digest_of(other, KEYS)
    assert digest_of(block, KEYS) == digest_of(block + bytes(-length % 4), KEYS), "as in a slot"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, WORDS - 1), st.integers(1, 4))
def test_parts_add_up_in_any_order(seed: int, cut: int, rows: int) -> None:
    draw = random.Random(seed)
    blocks = [draw.randbytes(WORDS * WORD_BYTES) for _ in range(rows)]
    words = torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.int32).view(rows, WORDS)
    scratch = torch.empty(scratch_words(rows * WORDS * WORD_BYTES), dtype=torch.int64)
    parts = [torch.zeros(LANES, rows, dtype=torch.int64) for _ in range(2)]
    pieces = [
        DigestPiece(words[:, :cut], KEYS[:, :cut], parts[0], scratch),
        DigestPiece(words[:, cut:], KEYS[:, cut:WORDS], parts[1], scratch),
    ]
    draw.shuffle(pieces)
    for piece in pieces:
        piece.add()
    assert folded(parts, KEYS) == [digest_of(block, KEYS) for block in blocks]


def test_another_seed_has_other_keys_and_digests() -> None:
    others = keys_of(b"another job", WORDS)
    assert not torch.equal(others, KEYS)
    assert digest_of(b"abc", others) != digest_of(b"abc", KEYS)
    assert torch.equal(keys_of(b"a job", WORDS), KEYS)


def test_the_lower_half_of_a_sum_would_miss_what_the_upper_sees() -> None:
    """Why only the upper bits count: the sign of a word is in the lower half of no product."""
    block, other = bytes(4), bytes([0, 0, 0, 0x80])
    lanes = [
        [sum(k * w for k, w in zip(lane, [word], strict=False)) % 2**31 for lane in KEYS.tolist()]
        for word in (0, -(2**31))
    ]
    assert lanes[0] == lanes[1]
    assert digest_of(block, KEYS) != digest_of(other, KEYS)
