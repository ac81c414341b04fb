"""Replicas by blocks: those blocks, and only those, that hold nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.replicas import Replicas

BLOCK_BYTES = 256


@given(st.lists(st.tuples(st.integers(0, 1500), st.booleans()), min_size=1, max_size=12))
def test_every_byte_of_their_blocks_is_theirs_or_nobodys(tensors: list[tuple[int, bool]]) -> None:
    layout = lay_out(
        [TensorSpec(f"t{n}", "uint8", (size,), size) for n, (size, _) in enumerate(tensors)]
    )
    chosen = tuple(n for n, (_, is_shared) in enumerate(tensors) if is_shared)
    found = Replicas((0, 1), 7, chosen, (), True, "").in_blocks(layout, BLOCK_BYTES)
    spans = () if found is None else found.spans
    mine = {
        b
        for begin, size in spans
        for b in range(begin // BLOCK_BYTES, (begin + size) // BLOCK_BYTES)
    }
    assert all(begin % BLOCK_BYTES == size % BLOCK_BYTES == 0 for begin, size in spans)
    for block in range(layout.objects_offset // BLOCK_BYTES):
        inside = range(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
        there = {
            n
            for n, s in enumerate(layout.segments)
            if s.offset < inside.stop and s.end > inside.start
        }
        there -= {n for n in there if layout.segments[n].spec.nbytes == 0}
        assert (block in mine) is (bool(there) and there <= set(chosen))
    assert found is None or found.group not in (0, 7), "no digest of blocks is taken for another"
