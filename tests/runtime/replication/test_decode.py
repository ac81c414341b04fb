"""Decode: whatever the steps, the payload is the lost one, and the checksums are those of its
blocks."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from keepstep.coding.checksum import checksum
from keepstep.coding.reed_solomon import rebuild, solve
from keepstep.core.redundancy.stripes import (
    Combine,
    Piece,
    StripeRegion,
    chunks,
    decode_plan,
    stripes_of_snapshots,
)
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.kept import KeptBlocks
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import BlockRange, Part
from keepstep.runtime.replication.decode import PayloadDecoder
from keepstep.runtime.replication.receive import IncomingSnapshot, copy_ranges_of
from tests.runtime.replication.room import BLOCK_BYTES, JOB_DIR, a_memory

STAMP = Stamp(6, 2)


class Told(IncomingSnapshot):
    """Remembers what it is told."""

    def __init__(self, slot: Slot, nbytes: int) -> None:
        ranges = copy_ranges_of(nbytes, 2, slot.block_bytes)
        super().__init__(slot, 0, STAMP, nbytes, 2, ranges, lambda: None)
        self.sums: list[tuple[BlockRange, int]] = []

    def computed(self, range_: BlockRange, found: int) -> None:
        self.sums.append((range_, found))


def sources_of(
    step: Combine, data: dict[int, bytes], parities: dict[int, bytearray]
) -> list[bytearray]:
    def region(piece: Piece) -> bytes | bytearray:
        return (data if piece.region is StripeRegion.DATA else parities)[piece.member]

    return [bytearray(region(piece)[piece.start : piece.stop]) for piece in step.sources]


@given(
    sizes=st.lists(st.integers(1, 5 * BLOCK_BYTES), min_size=2, max_size=5),
    step_bytes=st.integers(1, 3 * BLOCK_BYTES),
    lacking=st.frozensets(st.integers(0, 5), max_size=4),
)
def test_the_lost_payload_and_the_checksums_of_its_blocks(
    sizes: list[int], step_bytes: int, lacking: frozenset[int]
) -> None:
    """Of those that it keeps: what it lacks is in no parity."""
    chance = random.Random(f"{sizes}")
    data = {rank: chance.randbytes(nbytes) for rank, nbytes in enumerate(sizes)}
    stripes = stripes_of_snapshots(range(len(sizes)), 1, sizes)
    parities = {rank: bytearray(stripes.parity_bytes) for rank in data}
    for codeword in range(len(sizes)):
        pieces = [stripes.piece(codeword, index) for index in range(len(sizes))]
        [parity] = [piece for piece in pieces if piece.region is StripeRegion.PARITY]
        given_ = sorted((p for p in pieces if p is not parity), key=lambda p: p.position)
        rows = solve(stripes.k, 1, tuple(p.position for p in given_), (parity.position,))
        sources = [bytearray(data[p.member][p.start : p.stop]) for p in given_]
        rebuild(rows, sources, [parities[parity.member]])
    memory = a_memory()
    lacking = frozenset(b for b in lacking if b < len(lacking) + sizes[0] // BLOCK_BYTES)
    payload_bytes = sizes[0] + len(lacking) * BLOCK_BYTES
    lacking = lacking if max(lacking, default=-1) < payload_bytes // BLOCK_BYTES else frozenset()
    payload_bytes = sizes[0] + len(lacking) * BLOCK_BYTES
    slot = Slot.create(memory, slot_path(JOB_DIR, 0, 0), payload_bytes, 100)
    incoming = Told(slot, payload_bytes)
    decoder = PayloadDecoder(stripes, incoming, KeptBlocks(payload_bytes, BLOCK_BYTES, lacking))
    for combine in decode_plan(stripes, [0], 0):
        if combine.targets[0].region is StripeRegion.DATA:
            for step in chunks(combine, step_bytes):
                if step.targets:
                    decoder.rebuild(step, sources_of(step, data, parities))
    blocks = [b for b in range(-(-payload_bytes // BLOCK_BYTES)) if b not in lacking]
    expected = []
    for index, block in enumerate(blocks):
        kept = data[0][index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
        at = block * BLOCK_BYTES
        assert bytes(slot.payload[at : at + len(kept)]) == kept
        expected.append((BlockRange(Part.PAYLOAD, at, len(kept)), checksum(kept)))
    assert incoming.sums == expected
    for block in lacking:
        at = block * BLOCK_BYTES
        assert not any(slot.payload[at : at + BLOCK_BYTES])
