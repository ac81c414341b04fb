"""Replica digest: one checksum of what other ranks' snapshots hold, too.

Comes in: a slot whose blocks are hashed, and which spans of its payload are replicated. Goes out:
one number, equal for equal bytes in equal places. Blocks that lie in a span as a whole are not read
again: their checksums stand for them. What is left of each span, at most a block at either end, is
hashed.

Invariant: two digests of the same spans differ when a byte in them does, but by chance (2^-62).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keepstep.coding.checksum import checksum, pack_table, running_checksum
from keepstep.edge.shm.slot import Slot
from keepstep.model.layout import Layout
from keepstep.model.snapshot import SlotHeader

Spans = Iterable[tuple[int, int]]


def replica_digest(slot: Slot, header: SlotHeader, spans: Spans) -> int:
    """`header`: as `Slot.write_table` returned it. Raises DamageError when the table does not prove
    any more."""
    payload, table, size = slot.payload, slot.table(header), slot.block_bytes
    running = running_checksum()
    sums: list[int] = []
    for begin, nbytes in spans:
        end = begin + nbytes
        first, last = -(-begin // size), end // size
        if first < last:
            running.update(payload[begin : first * size])
            sums += table[first:last]
            running.update(payload[last * size : end])
        else:
            running.update(payload[begin:end])
    running.update(pack_table(sums))
    return running.intdigest()


def tensor_sums(slot: Slot, layout: Layout, segments: Sequence[int]) -> list[int]:
    """The checksum of each of these tensors, in order: all of their bytes are read."""
    chosen = [layout.segments[index] for index in segments]
    return [checksum(slot.payload[s.offset : s.end]) for s in chosen]


def block_sums(
    slot: Slot, header: SlotHeader, layout: Layout, segments: Sequence[int]
) -> list[int]:
    """For each of these tensors, in order, one checksum of those of the blocks it lies in: also
    where other ranks keep these blocks. Raises DamageError when the table does not prove."""
    table, size = slot.table(header), slot.block_bytes
    chosen = [layout.segments[index] for index in segments]
    return [checksum(pack_table(table[s.offset // size : -(-s.end // size)])) for s in chosen]
