"""What is kept of a payload, beside its bytes laid one behind the other by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.kept import KeptBlocks, kept_of
from keepstep.model.shares import bits_of


@st.composite
def snapshots(draw: st.DrawFn) -> tuple[bytes, int, frozenset[int]]:
    block_bytes = draw(st.integers(1, 9))
    payload = bytes(draw(st.lists(st.integers(0, 255), max_size=60)))
    full = range(len(payload) // block_bytes)
    lacking = draw(st.frozensets(st.sampled_from(full))) if full else frozenset()
    return payload, block_bytes, lacking


@given(snapshots(), st.data())
def test_stretches_are_what_is_kept_in_order(
    snapshot: tuple[bytes, int, frozenset[int]], data: st.DataObject
) -> None:
    payload, size, lacking = snapshot
    blocks = [payload[at : at + size] for at in range(0, len(payload), size)]
    expected = b"".join(block for n, block in enumerate(blocks) if n not in lacking)
    kept = kept_of(len(payload), size, bits_of(lacking))
    assert kept.nbytes == len(expected)
    at = data.draw(st.integers(0, len(expected)))
    nbytes = data.draw(st.integers(0, len(expected) - at))
    places = list(kept.stretches(at, nbytes))
    found = b"".join(payload[begin : begin + count] for begin, count in places)
    assert found == expected[at : at + nbytes]


@given(snapshots())
def test_a_whole_block_is_known_by_its_number_and_nothing_else_is(
    snapshot: tuple[bytes, int, frozenset[int]],
) -> None:
    payload, size, lacking = snapshot
    kept = KeptBlocks(len(payload), size, lacking)
    for index, block in enumerate(kept.blocks):
        nbytes = min(size, len(payload) - block * size)
        assert block not in lacking and kept.block_at(index * size, nbytes) == block
        assert kept.block_at(index * size, nbytes + 1) is None
        if size > 1:
            assert kept.block_at(index * size + 1, nbytes) is None


def test_a_block_that_is_not_full_is_nobody_elses() -> None:
    with pytest.raises(ValueError, match="lack 2"):
        kept_of(25, 10, bits_of({2}))
    assert kept_of(30, 10, bits_of({2})).nbytes == 20
