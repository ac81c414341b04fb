"""Shares: which ranks of a node hold the same, and which of them keeps what of it.

Comes in: what each rank's slot tells of one step that all hold: where its tensors lie, the
checksums of all its blocks, and which of these stand still between updates. Goes out: for each rank
at most one class of replicas that it belongs to, and which blocks each member keeps. REFT's sharded
snapshot (arXiv 2310.12670): of n replicas each copies and keeps 1/n of what is equal, in one run of
blocks, and all the rest of its own.

That replicas are equal is found here, by checksums, and never taken for granted: every later step
is proven again (`SharePlan.share`), and a step at which they differ counts for nobody. Pure.

Invariant: ranks that are told the same make the same plan, and of every shared block some member is
the keeper.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from keepstep.model.layout import Layout, Segment
from keepstep.model.shares import Share, is_same_share


@dataclass(frozen=True)
class RankBlocks:
    """One rank's snapshot of a step, block by block. `still`: the blocks that hold nothing but what
    an optimizer owns; what is beside it (buffers, random states, plain values) is each rank's own,
    however equal it looks."""

    rank: int
    layout: Layout
    block_bytes: int
    sums: Sequence[int]
    still: frozenset[int]
    lacking: frozenset[int] = frozenset()  # blocks that others keep
    share: Share | None = None  # by which some of these are equal to others'; None: by checksums
    payload_bytes: int = 0

    @cached_property
    def segments_in(self) -> Mapping[int, tuple[Segment, ...]]:
        """By block: the tensors that have bytes there."""
        found: dict[int, list[Segment]] = {}
        size = self.block_bytes
        for segment in self.layout.segments:
            if segment.spec.nbytes:
                for block in range(segment.offset // size, (segment.end - 1) // size + 1):
                    found.setdefault(block, []).append(segment)
        return {block: tuple(segments) for block, segments in found.items()}

    @cached_property
    def contents(self) -> Mapping[int, Hashable]:
        """Of the blocks that may be shared: what each holds. Equal for two ranks where the same
        parts of the same tensors, at the same places, have the same bytes."""
        return {
            block: (self.sums[block], self.segments_in.get(block, ()))
            for block in self.still
            if block < len(self.sums)
        }


@dataclass(frozen=True)
class SharePlan:
    """One class of replicas. `members`: their ranks, ascending; `blocks`: those that they share,
    ascending, of which the i-th member keeps the i-th run."""

    members: tuple[int, ...]
    blocks: tuple[int, ...]
    block_bytes: int
    number: int = field(init=False)  # equal for members that plan the same; never 0

    def __post_init__(self) -> None:
        text = repr((self.members, self.blocks, self.block_bytes)).encode()
        object.__setattr__(self, "number", _digest(text))

    @cached_property
    def shared(self) -> frozenset[int]:
        return frozenset(self.blocks)

    def kept_by(self, rank: int) -> frozenset[int]:
        """The shared blocks that this member keeps: as many as any other, or one less."""
        at, count = self.members.index(rank), len(self.members)
        total = len(self.blocks)
        return frozenset(self.blocks[total * at // count : total * (at + 1) // count])

    def lacked_by(self, rank: int) -> frozenset[int]:
        """The shared blocks that others keep for this member."""
        return self.shared - self.kept_by(rank)

    def share(self, sums: Sequence[int], lacks: bool) -> Share:
        """What a member tells of a snapshot with these checksums. `lacks`: others keep of it."""
        words = array("Q", [self.number, *map(sums.__getitem__, self.blocks)])
        return Share(_digest(words.tobytes()), len(self.members) if lacks else 0)

    def differing(self, one: Sequence[int], other: Sequence[int]) -> list[int]:
        """The shared blocks whose checksums are not equal in two members' tables."""
        return [
            block for block in self.blocks if one[block : block + 1] != other[block : block + 1]
        ]


def resolved(told: Sequence[RankBlocks]) -> list[RankBlocks] | None:
    """The same, each with the checksums of all its blocks. Of what a rank left to others on a
    device its table has a digest in place of the checksum: that is with whoever keeps the block
    and told the same of all that they share. None where nobody does.
    """
    found = []
    for one in told:
        sums = list(one.sums)
        for block in one.lacking:
            keeper = next((other for other in told if keeps_for(other, one, block)), None)
            if keeper is None:
                return None
            sums[block] = keeper.sums[block]
        found.append(replace(one, sums=tuple(sums)))
    return found


def keeps_for(keeper: RankBlocks, one: RankBlocks, block: int) -> bool:
    """Whether the block of `one` can be had there."""
    if block in keeper.lacking or block >= len(keeper.sums):
        return False
    return keeper.sums[block] == one.sums[block] or is_same_share(keeper.share, one.share)


def plan_of(rank: int, told: Sequence[RankBlocks]) -> SharePlan | None:
    """The class that `rank` belongs to; None when it has no replica here."""
    for plan in plans(told):
        if rank in plan.members:
            return plan
    return None


def plans(told: Sequence[RankBlocks]) -> list[SharePlan]:
    """All classes of replicas among the ranks of a node, of two members or more.

    Of ranks whose tensors have the same places (data-parallel replicas) either all together, in
    what is equal, or those that are equal in everything: whichever saves more. Of the rest all
    together, in what is equal (what FSDP and tensor parallelism replicate).
    """
    made: list[SharePlan] = []
    left: list[RankBlocks] = []
    ranks = sorted(told, key=lambda one: one.rank)
    for alike in _sorted_into(ranks, lambda one: (one.layout, one.block_bytes)):
        together = _classes([alike])
        equal = _classes(_sorted_into(alike, lambda one: frozenset(one.contents.items())))
        found = max(together, equal, key=lambda plans: sum(map(_saved_blocks, plans)))
        made += found
        members = {rank for plan in found for rank in plan.members}
        left += [one for one in alike if one.rank not in members]
    rest = sorted(left, key=lambda one: one.rank)
    made += _classes(_sorted_into(rest, lambda one: one.block_bytes))
    return sorted(made, key=lambda plan: plan.members)


def _classes(groups: Sequence[Sequence[RankBlocks]]) -> list[SharePlan]:
    """One of each group that has something to share."""
    found = []
    for group in groups:
        blocks = _equal_blocks(group) if len(group) > 1 else ()
        if blocks:
            members = tuple(one.rank for one in group)
            found.append(SharePlan(members, blocks, group[0].block_bytes))
    return found


def _saved_blocks(plan: SharePlan) -> int:
    """That need not be kept."""
    return len(plan.blocks) * (len(plan.members) - 1)


def _sorted_into(
    ranks: Sequence[RankBlocks], kind: Callable[[RankBlocks], Hashable]
) -> list[list[RankBlocks]]:
    found: dict[Hashable, list[RankBlocks]] = {}
    for one in ranks:
        found.setdefault(kind(one), []).append(one)
    return list(found.values())


def _equal_blocks(ranks: Sequence[RankBlocks]) -> tuple[int, ...]:
    """What all of them may share.

    A tensor of which some whole block differs is no replica, and nothing of it is shared: the other
    blocks may be equal for the moment only (rows of an embedding that nobody has used yet, in
    shards of which nothing says that they are shards).
    """
    first, others = ranks[0], ranks[1:]
    differing = {
        segment.spec.name
        for other in others
        for block in first.still & other.still
        if not _is_equal(block, first, other)
        for segment in _filling(block, first)
    }
    return tuple(
        sorted(
            block
            for block in first.contents
            if all(_is_equal(block, first, other) for other in others)
            and all(s.spec.name not in differing for s in first.segments_in.get(block, ()))
        )
    )


def _is_equal(block: int, one: RankBlocks, other: RankBlocks) -> bool:
    return block in other.contents and one.contents[block] == other.contents[block]


def _filling(block: int, ranks: RankBlocks) -> Iterable[Segment]:
    """The tensor, if there is one, that has the whole block."""
    begin, end = block * ranks.block_bytes, (block + 1) * ranks.block_bytes
    return (
        segment
        for segment in ranks.segments_in.get(block, ())
        if segment.offset <= begin and segment.end >= end
    )


def _digest(text: bytes) -> int:
    """64 bits; never 0."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") or 1
