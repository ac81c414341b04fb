"""Replica digests: equal exactly when the replicated bytes are, whatever lies beside them, and the
same whether a block was read or its checksum stood for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.coding.checksum import checksum
from keepstep.edge.shm.memory import SharedMemory
from keepstep.edge.shm.replica_digest import replica_digest, tensor_sums
from keepstep.edge.shm.slot import Slot
from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.snapshot import Stamp

BLOCK = 4096
PAYLOAD = 10 * BLOCK + 700


class SmallBlocks(SharedMemory):
    """As real memory but for the size of its blocks."""

    block_bytes = BLOCK


@pytest.fixture(scope="module")
def slot(tmp_path_factory: pytest.TempPathFactory) -> Slot:
    path = tmp_path_factory.mktemp("slots") / "slot-0"
    return Slot.create(SmallBlocks(), path, PAYLOAD, 4096)


def digest_of(slot: Slot, payload: bytes, spans: list[tuple[int, int]]) -> int:
    slot.begin(bytes(16), 0, 2, 1, Stamp(3, 1))
    slot.payload[: len(payload)] = payload
    return replica_digest(slot, slot.write_table(len(payload), b"{}"), spans)


@st.composite
def spans_of(draw: st.DrawFn) -> list[tuple[int, int]]:
    edges = sorted(draw(st.sets(st.integers(0, PAYLOAD), min_size=2, max_size=8)))
    pairs = zip(edges[::2], edges[1::2], strict=False)
    return [(begin, end - begin) for begin, end in pairs]


@settings(deadline=None)
@given(spans_of(), st.integers(0, 2**32), st.integers(0, PAYLOAD - 1), st.integers(0, 7))
def test_a_flipped_bit_shows_exactly_where_it_is_replicated(
    slot: Slot, spans: list[tuple[int, int]], seed: int, at: int, bit: int
) -> None:
    payload = bytearray((seed * 31 + n * 7) % 251 for n in range(PAYLOAD))
    before = digest_of(slot, bytes(payload), spans)
    payload[at] ^= 1 << bit
    is_replicated = any(begin <= at < begin + nbytes for begin, nbytes in spans)
    assert (digest_of(slot, bytes(payload), spans) != before) is is_replicated


def test_the_sums_of_tensors_are_those_of_their_bytes(slot: Slot) -> None:
    layout = lay_out([TensorSpec(f"t{n}", "uint8", (n,), n) for n in (5, 100, 3 * BLOCK)])
    payload = bytes(n % 251 for n in range(layout.objects_offset))
    slot.payload[: len(payload)] = payload
    expected = [checksum(payload[s.offset : s.end]) for s in layout.segments]
    assert tensor_sums(slot, layout, [0, 1, 2]) == expected
    assert tensor_sums(slot, layout, [2]) == expected[2:]
