"""XOR in place against one byte at a time."""

from __future__ import annotations

from functools import reduce
from operator import xor
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from keepstep.coding import xor as fast

sources = st.lists(st.binary(max_size=300), min_size=1, max_size=6)


def plainly(length: int, parts: list[bytes]) -> bytes:
    return bytes(
        reduce(xor, (part[i] for part in parts if i < len(part)), 0) for i in range(length)
    )


@given(sources, st.integers(0, 20), st.integers(1, 128))
def test_a_parity_is_the_xor_of_its_sources_and_zeros_after_them(
    parts: list[bytes], more: int, tile: int
) -> None:
    target = bytearray(b"\xa5" * (max(map(len, parts)) + more))
    with patch.object(fast, "TILE_BYTES", tile):
        fast.xor_of(target, parts)
    assert bytes(target) == plainly(len(target), parts)


@given(sources, st.binary(max_size=20), st.integers(1, 128))
def test_adding_goes_on_from_what_was_there(parts: list[bytes], more: bytes, tile: int) -> None:
    before = parts[0].ljust(max(map(len, parts)), b"\x5a") + more
    target = bytearray(before)
    with patch.object(fast, "TILE_BYTES", tile):
        fast.xor_into(target, parts)
    assert bytes(target) == plainly(len(before), [before, *parts])


def test_it_writes_into_the_buffer_it_was_given_and_nowhere_else() -> None:
    memory = bytearray(range(200))
    fast.xor_of(memoryview(memory)[67:131], [bytes(64), memoryview(memory)[1:65].toreadonly()])
    assert memory == bytes([*range(67), *range(1, 65), *range(131, 200)])
