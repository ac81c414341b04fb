"""Shares: which blocks of a snapshot lie with other ranks, as slots and pages say it.

Ranks that train the same hold the same bytes. Each keeps some blocks of its snapshot, and the
checksums of all of them, or digests in their place where blocks never left a device.
`core/redundancy/shares.py` decides who keeps what.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from keepstep.model.bounds import Checksum, Rank


class Share(NamedTuple):
    """Of one snapshot of a rank that shares. `digest`: of the checksums of all blocks that are
    shared; replicas of one step tell the same. `ranks`: so many have to tell it, this one among
    them, or what this rank does not keep is nowhere; 0 where it keeps everything itself."""

    digest: Checksum
    ranks: Rank


def is_same_share(one: Share | None, other: Share | None) -> bool:
    """Whether both are told of the same blocks with the same bytes."""
    return one is not None and other is not None and one.digest == other.digest


def bits_of(blocks: Iterable[int]) -> bytes:
    """Numbers of blocks as a bitmap, its last byte not zero; empty for none."""
    number = 0
    for block in blocks:
        number |= 1 << block
    return number.to_bytes(-(-number.bit_length() // 8), "little")


@lru_cache(maxsize=1 << 6)  # slots keep their holes
def blocks_of(bits: bytes) -> frozenset[int]:
    """The inverse of `bits_of`."""
    return frozenset(
        8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1
    )


def runs_of(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """(first, how many) of blocks that follow each other, in order."""
    runs: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if runs and sum(runs[-1]) == block:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((block, 1))
    return runs
