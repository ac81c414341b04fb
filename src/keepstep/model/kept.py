"""Kept: the blocks of a snapshot that are in its own slot, one behind the other.

Parities are computed over these: what a rank leaves to others on its node (`shares.py`) is in
theirs, and would be in the parity twice. Comes in: the size of a payload and the blocks that it
lacks. Goes out: where the bytes of what is kept lie in the payload, and which block each is. Pure.

Invariant: only full blocks are left to others, so all kept ones but the last are full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from keepstep.model.shares import blocks_of


@dataclass(frozen=True)
class KeptBlocks:
    """Of one payload. Offsets `at` count what is kept alone."""

    payload_bytes: int
    block_bytes: int
    lacking: frozenset[int]

    @property
    def nbytes(self) -> int:
        """All that is kept."""
        return self.payload_bytes - len(self.lacking) * self.block_bytes

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Their numbers, ascending."""
        count = -(-self.payload_bytes // self.block_bytes)
        return tuple(block for block in range(count) if block not in self.lacking)

    def stretches(self, at: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """(offset in the payload, bytes) of these, in order."""
        if not self.lacking:
            yield at, nbytes
            return
        size = self.block_bytes
        while nbytes > 0:
            index, start = divmod(at, size)
            part = min(size - start, nbytes)
            yield self.blocks[index] * size + start, part
            at, nbytes = at + part, nbytes - part

    def block_at(self, at: int, nbytes: int) -> int | None:
        """The block that these are, where they are a whole one."""
        size = self.block_bytes
        if at % size or nbytes != min(size, self.nbytes - at):
            return None
        return self.blocks[at // size]


@lru_cache(maxsize=1 << 6)  # slots keep their holes
def kept_of(payload_bytes: int, block_bytes: int, lacking: bytes) -> KeptBlocks:
    """`lacking`: as a slot's header tells it. Raises ValueError where it cannot be so."""
    lacks = blocks_of(lacking)
    if max(lacks, default=-1) >= payload_bytes // block_bytes:
        raise ValueError(f"{payload_bytes} bytes in blocks of {block_bytes} lack {max(lacks)}")
    return KeptBlocks(payload_bytes, block_bytes, lacks)
