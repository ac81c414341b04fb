"""Checksums: the published values, blocks against the whole, and every single bit."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from keepstep.coding.checksum import (
    BLOCK_BYTES,
    block_checksums,
    checksum,
    first_mismatch,
    in_threads,
    pack_table,
    unpack_table,
)

# XXH3_64bits with seed 0 over the reference implementation's sanity buffer, by length (xxHash 0.8,
# cli/xsum_sanity_check.c).
PUBLISHED = {
    0: 0x2D06800538D394C2,
    1: 0xC44BDFF4074EECDB,
    6: 0x27B56A84CD2D7325,
    12: 0xA713DAF0DFBB77E7,
    24: 0xA3FE70BF9D3510EB,
    48: 0x397DA259ECBA1F11,
    80: 0xBCDEFBBB2C47C90A,
    195: 0xCD94217EE362EC3A,
    403: 0xCDEB804D65C6DEA4,
    512: 0x617E49599013CB6B,
    2048: 0xDD59E2C3A5F038E0,
    2240: 0x6E73A90539CF2948,
    2367: 0xCB37AEB9E5D361ED,
}

blocks = st.integers(1, 64)
payloads = st.binary(max_size=400)


def sanity_buffer(length: int) -> bytes:
    state, out = 2654435761, bytearray()
    for _ in range(length):
        out.append(state >> 56)
        state = state * 11400714785074694797 % (1 << 64)
    return bytes(out)


@pytest.mark.parametrize("length", PUBLISHED)
def test_the_published_values(length: int) -> None:
    assert checksum(sanity_buffer(length)) == PUBLISHED[length]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_equal_bytes_have_equal_checksums_whatever_holds_them(kind: type) -> None:
    data = random.Random(1).randbytes(5000)
    assert checksum(kind(data)) == checksum(data)


@given(payloads, st.lists(st.integers(0, 400), max_size=4))
def test_at_once_or_in_pieces(data: bytes, cuts: list[int]) -> None:
    pieces = xxhash.xxh3_64()
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        pieces.update(data[begin:end])
    assert checksum(data) == pieces.intdigest()


@given(payloads, blocks)
def test_one_checksum_a_block_and_none_for_nothing(data: bytes, block_bytes: int) -> None:
    sums = block_checksums(memoryview(data), block_bytes)
    assert sums == [
        checksum(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)
    ]
    assert first_mismatch(memoryview(data), sums, block_bytes) is None


@given(st.binary(min_size=1, max_size=400), blocks, st.data())
def test_one_flipped_bit_is_found_in_its_block(
    data: bytes, block_bytes: int, draw: st.DataObject
) -> None:
    sums = block_checksums(memoryview(data), block_bytes)
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    block = bit // 8 // block_bytes
    assert first_mismatch(memoryview(flipped), sums, block_bytes) == (
        block,
        sums[block],
        checksum(flipped[block * block_bytes :][:block_bytes]),
    )


def test_missing_bytes_are_a_mismatch() -> None:
    data = memoryview(bytes(100))
    found = first_mismatch(data[:90], block_checksums(data, 40), 40)
    assert found is not None and found[0] == 2


def test_a_block_is_four_mebibytes_unless_said_otherwise() -> None:
    assert len(block_checksums(memoryview(bytes(BLOCK_BYTES + 1)))) == 2


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_the_table_comes_back(sums: list[int]) -> None:
    packed = pack_table(sums)
    assert len(packed) == 8 * len(sums)
    assert list(unpack_table(packed)) == sums


def test_the_table_is_little_endian() -> None:
    assert pack_table([1, 1 << 63]) == bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80])


def test_blocks_are_hashed_also_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the interpreter ends, when the last snapshot is still on its way."""
    assert in_threads(lambda block: 10 * block, range(20), 4) == [10 * n for n in range(20)]

    def refuses(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuses)
    assert in_threads(lambda block: 10 * block, range(20), 4) == [10 * n for n in range(20)]
