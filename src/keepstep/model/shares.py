"""Shares: which blocks of a snapshot lie with other ranks, as slots, pages and keepers say it.

Ranks that train the same hold the same bytes. Each keeps some blocks of its snapshot, and the
checksums of all of them, or digests in their place where blocks never left a device.
`core/redundancy/shares.py` decides who keeps what; over nodes `core/redundancy/share_classes.py`
decides who are replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from keepstep.model.bounds import Checksum, Rank

MOST_RUNS = 4  # of a class's ranks: what is more scattered is not shared


class Share(NamedTuple):
    """Of one snapshot of a rank that shares. `digest`: of the checksums of all blocks that are
    shared; replicas of one step tell the same. `ranks`: so many have to tell it, this one among
    them, or what this rank does not keep is nowhere; 0 where it keeps everything itself, and 1
    where it goes by no plan and tells what others may have, too."""

    digest: Checksum
    ranks: Rank


CANDIDATE = 1  # `Share.ranks` of who looks for replicas


class RankRun(NamedTuple):
    """`ranks` of them from `first` on, `stride` apart: replicas of one rank of each node are so."""

    first: Rank
    ranks: Rank
    stride: Rank


class ShareClass(NamedTuple):
    """Replicas, on whichever nodes, as the leader names them. `told`: what all of them told when
    they were found. `number`: of the plan by which all of them go, 0 until they do. `is_over`: not
    all of them do any more, or they have differed: who still does gives it up."""

    runs: tuple[RankRun, ...]
    told: Checksum
    number: Checksum = 0
    is_over: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """Their ranks, ascending."""
        return members_of(self.runs)


@lru_cache(maxsize=1 << 6)  # looked at in every step
def members_of(runs: tuple[RankRun, ...]) -> tuple[int, ...]:
    """The ranks of these runs, ascending."""
    return tuple(
        sorted(first + at * stride for first, count, stride in runs for at in range(count))
    )


def rank_runs(ranks: Iterable[int]) -> tuple[RankRun, ...]:
    """The inverse of `members_of`: as few as a look from the left finds."""
    left = sorted(ranks)
    found = []
    while left:
        stride = left[1] - left[0] if len(left) > 1 else 1
        count = 1
        while count < len(left) and left[count] == left[0] + count * stride:
            count += 1
        found.append(RankRun(left[0], count, stride))
        left = left[count:]
    return tuple(found)


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
