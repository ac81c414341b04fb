"""Memory that gives back other bytes than were written."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.preflight import memory
from keepstep.edge.preflight.memory import CHUNK_BYTES, Patterns, check_memory, first_difference


def test_sound_memory_passes() -> None:
    assert check_memory(3 * CHUNK_BYTES) is None


def broken_map(change: Any) -> type:
    """A map whose reads go through `change(bytes, offset)`."""

    class BrokenMap(mmap.mmap):
        def __getitem__(self, place: Any) -> Any:
            return change(super().__getitem__(place), place.start)

    return BrokenMap


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("value", [0, 1])
def test_a_stuck_bit_is_found_where_it_is(
    monkeypatch: pytest.MonkeyPatch, bit: int, value: int
) -> None:
    at = CHUNK_BYTES + 12_345

    def stuck(data: bytes, start: int) -> bytes:
        if start <= at < start + len(data):
            changed = bytearray(data)
            changed[at - start] = changed[at - start] & ~(1 << bit) | value << bit
            return bytes(changed)
        return data

    monkeypatch.setattr(memory.mmap, "mmap", broken_map(stuck))
    found = check_memory(3 * CHUNK_BYTES)
    assert found is not None and found.offset == at
    assert found.written ^ found.read == 1 << bit and found.wrong_bits == 1


def test_an_address_line_that_leads_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks in one place: whatever was written last is what both give."""

    class Aliased(mmap.mmap):
        def __getitem__(self, place: Any) -> Any:
            if place.start == 0:
                place = slice(2 * CHUNK_BYTES, 3 * CHUNK_BYTES)
            return super().__getitem__(place)

    monkeypatch.setattr(memory.mmap, "mmap", Aliased)
    found = check_memory(4 * CHUNK_BYTES)
    assert found is not None and found.offset < CHUNK_BYTES


def test_no_two_chunks_near_each_other_are_alike() -> None:
    patterns = Patterns()
    for turn in range(2):
        chunks = [patterns.chunk(turn, index) for index in range(300)]
        assert len(set(chunks)) == 300 and {len(chunk) for chunk in chunks} == {CHUNK_BYTES}
    both = zip(patterns.chunk(0, 5), patterns.chunk(1, 5), strict=True)
    assert all(one ^ other == 0xFF for one, other in both)


@given(st.binary(min_size=1, max_size=64), st.data())
def test_the_first_difference_is_the_first(written: bytes, data: st.DataObject) -> None:
    read = data.draw(st.binary(min_size=len(written), max_size=len(written)))
    found = first_difference(written, read, 1000)
    differing = [n for n, (a, b) in enumerate(zip(written, read, strict=True)) if a != b]
    if not differing:
        assert found is None
    else:
        assert found is not None
        place = differing[0]
        assert (found.offset, found.written, found.read) == (
            1000 + place,
            written[place],
            read[place],
        )
        bits = sum((a ^ b).bit_count() for a, b in zip(written, read, strict=True))
        assert found.wrong_bits == bits


def test_the_canary_sees_and_notices_when_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.can_see()
    monkeypatch.setattr(memory, "first_difference", lambda written, read, at=0: None)
    assert not memory.can_see()


def test_copies_are_measured() -> None:
    speeds = memory.copy_speeds(CHUNK_BYTES, 3)
    assert len(speeds) == 3 and min(speeds) > 0
