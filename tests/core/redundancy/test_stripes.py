"""Parity: the layout's invariants, and plans that give back every byte."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.redundancy.stripes import (
    StripeRegion,
    Stripes,
    chunks,
    decode_plan,
    stripes_of_snapshots,
)
from keepstep.model.layout import ALIGN_BYTES
from keepstep.model.units import KIB, MIB
from tests.core.parity_memory import carry_out, encode_plan, encoded

groups = st.integers(2, 9).flatmap(
    lambda size: st.tuples(st.just(size), st.integers(1, min(size - 1, 3)))
)


@st.composite
def stripes_lists(draw: st.DrawFn) -> Stripes:
    size, tolerates = draw(groups)
    members = draw(st.permutations([10 * i for i in range(size)]))
    return stripes_of_snapshots(
        members, tolerates, draw(st.lists(st.integers(0, 2000), min_size=size, max_size=size))
    )


@given(stripes_lists())
def test_a_codeword_has_one_block_of_every_member_and_every_byte_one_codeword(
    stripes: Stripes,
) -> None:
    size = len(stripes.members)
    covered: dict[tuple[int, StripeRegion], list[tuple[int, int]]] = {}
    for codeword in range(size):
        pieces = [stripes.piece(codeword, i) for i in range(size)]
        assert [p.member for p in pieces] == list(stripes.members)
        assert sorted(p.position for p in pieces) == list(range(size))
        assert all((p.position >= stripes.k) == (p.region is StripeRegion.PARITY) for p in pieces)
        for p in pieces:
            assert p.nbytes <= stripes.block_bytes and (p.nbytes == 0 or p.start % 64 == 0)
            covered.setdefault((p.member, p.region), []).append((p.start, p.stop))
    for member, data_bytes in zip(stripes.members, stripes.data_bytes, strict=True):
        for region, length in (
            (StripeRegion.DATA, data_bytes),
            (StripeRegion.PARITY, stripes.parity_bytes),
        ):
            spans = sorted(span for span in covered[member, region] if span[0] < span[1])
            assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), length]


@given(stripes_lists(), st.data())
@settings(max_examples=200)
def test_any_tolerated_loss_is_rebuilt_to_the_byte(stripes: Stripes, data: st.DataObject) -> None:
    whole = encoded(stripes)
    lost = data.draw(
        st.lists(
            st.sampled_from(stripes.members), min_size=1, max_size=stripes.tolerates, unique=True
        )
    )
    memory = {
        place: bytearray(len(found)) if place[0] in lost else bytearray(found)
        for place, found in whole.items()
    }
    for member in lost:
        plan = decode_plan(stripes, lost, member)
        assert not {p.member for combine in plan for p in combine.sources} & set(lost)
        carry_out(
            [part for combine in plan for part in chunks(combine, data.draw(st.integers(1, 600)))],
            stripes,
            memory,
        )
    assert memory == whole


@given(groups, st.integers(0, 10**10), st.sampled_from([64, 4 * KIB, 4 * MIB]))
def test_little_of_a_block_is_empty_and_long_ones_end_with_a_checksum(
    group: tuple[int, int], data_bytes: int, checked_bytes: int
) -> None:
    size, tolerates = group
    sizes = [data_bytes] + [data_bytes // 2] * (size - 1)
    stripes = stripes_of_snapshots(range(size), tolerates, sizes, checked_bytes)
    empty = stripes.k * stripes.block_bytes - data_bytes
    assert empty >= 0
    if stripes.block_bytes > 8 * checked_bytes:
        assert stripes.block_bytes % checked_bytes == 0 and empty <= data_bytes / 8
    else:
        assert empty < stripes.k * ALIGN_BYTES


def test_every_pair_of_six_is_rebuilt_by_four_and_two() -> None:
    stripes = stripes_of_snapshots(range(6), 2, [4096, 4000, 4096, 0, 1, 4095])
    whole = encoded(stripes, seed=42)
    for lost in combinations(range(6), 2):
        memory = {
            place: bytearray(len(found)) if place[0] in lost else bytearray(found)
            for place, found in whole.items()
        }
        for member in lost:
            carry_out(decode_plan(stripes, lost, member), stripes, memory)
        assert memory == whole, lost


@pytest.mark.parametrize("size", range(2, 9))
def test_with_one_tolerated_it_is_the_rotating_parity_of_reft(size: int) -> None:
    """Node-major blocks; the parity of stripe s over everybody but s lies on s."""
    stripes = stripes_of_snapshots(range(size), 1, [(size - 1) * 64] * size)
    for s in range(size):
        for node in range(size):
            piece = stripes.piece(s, node)
            if node == s:
                assert (piece.region, piece.start, piece.stop) == (StripeRegion.PARITY, 0, 64)
            else:
                block = s if s < node else s - 1
                assert (piece.start, piece.stop) == (64 * block, 64 * (block + 1))


@pytest.mark.parametrize(("size", "tolerates"), [(6, 2), (9, 3), (12, 3)])
@pytest.mark.parametrize("lost", [1, 2])
def test_the_survivors_read_about_equally(size: int, tolerates: int, lost: int) -> None:
    stripes = stripes_of_snapshots(range(size), tolerates, [64_000] * size)
    plan = decode_plan(stripes, range(lost), 0)
    read = Counter(dict.fromkeys(range(lost, size), 0))
    for combine in plan:
        assert len(combine.sources) == stripes.k
        for piece in combine.sources:
            read[piece.member] += piece.nbytes
    assert max(read.values()) - min(read.values()) <= 2 * stripes.block_bytes


@given(stripes_lists(), st.integers(1, 300))
def test_chunks_are_the_same_work(stripes: Stripes, chunk_bytes: int) -> None:
    for combine in encode_plan(stripes, stripes.members[0]):
        parts = list(chunks(combine, chunk_bytes))
        assert all(
            p.nbytes <= chunk_bytes for part in parts for p in (*part.sources, *part.targets)
        )
        for which, whole in enumerate(combine.sources):
            spans = [part.sources[which] for part in parts]
            assert sum(p.nbytes for p in spans) == whole.nbytes
            assert all(a.stop == b.start for a, b in pairwise(spans))
        assert sum(part.targets[0].nbytes for part in parts) == combine.targets[0].nbytes
