"""Sharing over nodes: one snapshot among the replicas of a job, on whichever nodes they live
(REFT's sharding groups).

    every rank keeps all of its own, and tells a digest of all that it might share -> the leader
    says who told the same: the plan -> it says that all show that plan: each keeps its share
    -> it says that this is over: everything again

As `sharing.py`, whose rules for one snapshot hold here too; but what ranks of other nodes do is
known by the leader's word alone (`core/redundancy/share_classes.py`). Never waits for anybody.

Comes in: the leader's classes at step boundaries, and by whom the state that was resumed from is
shared. Goes out: which blocks the next snapshot need not have, and what its page tells of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.core.redundancy.share_classes import class_of
from keepstep.core.redundancy.shares import RankBlocks, SharePlan
from keepstep.edge.shm.slot_header import MOST_BLOCKS
from keepstep.edge.shm.status_page import StatusPage
from keepstep.errors import DamageError
from keepstep.model.layout import Layout
from keepstep.model.shares import CANDIDATE, RankRun, Share, ShareClass, members_of
from keepstep.model.snapshot import Stamp
from keepstep.ports import Acts, Gathered
from keepstep.runtime.rank.commit_view import CommitLook
from keepstep.runtime.rank.guarded import FailedWork, guarded
from keepstep.runtime.rank.sharing import (
    NOTHING,
    ShareOrder,
    Sharing,
    blocks_in_slot,
    shares_over_nodes,
)
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld
from keepstep.runtime.slot_locks import pin_one, unpin

KEPT_TOLD = 8  # of what it told to find replicas: the leader's word comes some steps later


def sharing_of(
    world: RankWorld, options: RankOptions, who: RankIdentity, page: StatusPage
) -> Sharing:
    """One rank's, among those that may keep one snapshot with it."""
    kind = SharingOverNodes if shares_over_nodes(options, who) else Sharing
    return kind(world, options, who, page)


@dataclass(frozen=True)
class CandidateOrder(ShareOrder):
    """Of a snapshot that is all of it this rank's own, and tells what others may have, too. What is
    on a device comes to the host all the same, and is told by checksums."""

    layout: Layout

    @property
    def blocks(self) -> tuple[frozenset[int], frozenset[int]]:
        """As `ShareOrder.blocks`."""
        return NOTHING, NOTHING

    def share(self, sums: Sequence[int]) -> Share:
        """As `ShareOrder.share`."""
        return self.plan.share(sums, lacks=False)._replace(ranks=CANDIDATE)


@dataclass(frozen=True)
class _Told:
    """What a rank has told of a snapshot to find replicas."""

    digest: int
    blocks: tuple[int, ...]
    layout: Layout


class SharingOverNodes(Sharing):
    """One rank's."""

    def __init__(
        self, world: RankWorld, options: RankOptions, who: RankIdentity, page: StatusPage
    ) -> None:
        super().__init__(world, options, who, page)
        self.is_on = True
        self._told: tuple[_Told, ...] = ()
        self._step = -1

    def forget(self) -> None:
        """As `Sharing.forget`."""
        super().forget()
        self._told = ()

    def resumed(self, stamp: Stamp, replicas: tuple[RankRun, ...] | None = ()) -> Acts[None]:
        """All ranks have loaded that stamp from memory, and none has gone on yet: all that share it
        find their own plan in their own slots, and go by it at once. Where they have differed at a
        later one, or share this one no more, each keeps all of its own for some steps, also where
        nobody shared this one yet: whoever differs may do so again, and before a job's end nobody
        would see it in time."""
        yield
        if replicas is None:
            self._next_step = stamp.step + self._pause_steps
            return
        own = yield from guarded(self._find_own(stamp))
        if own is None or isinstance(own, FailedWork):
            return
        blocks, share = own
        members = members_of(replicas)
        if self._who.rank in members:
            plan = SharePlan(members, _shareable(blocks), blocks.block_bytes)
            if blocks.lacking in (NOTHING, plan.lacked_by(self._who.rank)):
                self._adopt(plan, blocks.layout)
                self._is_agreed = True
                return
        if share is not None and share.ranks != CANDIDATE:
            self._next_step = stamp.step + self._pause_steps

    def _find_own(self, stamp: Stamp) -> Acts[tuple[RankBlocks, Share | None] | None]:
        """What this rank's slot tells."""
        yield
        slot = pin_one(self._world.memory, self._options.job_dir, stamp, self._who.rank)
        if slot is None:
            return None
        try:
            return blocks_in_slot(slot, self._who.rank, {}), slot.header().share
        except (DamageError, LookupError):
            return None
        finally:
            unpin([slot])

    # -- at a boundary

    def boundary(self, step: int, seen: CommitLook) -> None:
        """As `Sharing.boundary`."""
        self._step = step
        if seen.classes is None:
            return  # nobody leads who knows of it
        mine = class_of(self._who.rank, seen.classes)
        plan = self._plan
        if plan is None:
            self._look_for_class(step, mine)
        elif (
            mine is None
            or mine.is_over
            or mine.members != plan.members
            or mine.number not in (0, plan.number)
        ):
            self._pause(step)
        elif mine.number and not self._is_agreed:
            self._agree(plan)

    def _look_for_class(self, step: int, mine: ShareClass | None) -> None:
        former = self._former
        if former is not None and not self._is_former_over:
            # Until all have given it up they are told that this rank has all; else what they leave
            # to it would be nobody's.
            if mine is None or mine.number not in (0, former.number):
                self._is_former_over = True
                self._next_step = max(self._next_step, step)
            return
        if mine is None or mine.is_over or mine.number:
            return
        for told in self._told:
            if told.digest == mine.told:
                size = self._world.memory.block_bytes
                self._adopt(SharePlan(mine.members, told.blocks, size), told.layout)
                return

    # -- a snapshot

    def order(self, gathered: Gathered, still: frozenset[int]) -> ShareOrder | None:
        """As `Sharing.order`."""
        if self._plan is not None or not self._is_former_over or self._step < self._next_step:
            return super().order(gathered, still)
        size = self._world.memory.block_bytes
        blocks = _within(still, gathered.payload_bytes // size)
        if not blocks:
            self._tell_none(Stamp(self._step, 0), has_none=True)
            return None
        return CandidateOrder(SharePlan((), blocks, size), NOTHING, gathered.layout)

    def share(
        self, order: ShareOrder | None, sums: Sequence[int], digests: Mapping[int, int]
    ) -> Share | None:
        """As `Sharing.share`."""
        told = super().share(order, sums, digests)
        if told is not None and isinstance(order, CandidateOrder):
            new = _Told(told.digest, order.plan.blocks, order.layout)
            self._told = (*self._told[1 - KEPT_TOLD :], new)
        return told


def _shareable(own: RankBlocks) -> tuple[int, ...]:
    return _within(own.still, own.payload_bytes // own.block_bytes)


def _within(still: frozenset[int], full_blocks: int) -> tuple[int, ...]:
    """All that a rank might share of so many full blocks."""
    end = min(full_blocks, MOST_BLOCKS)
    return tuple(sorted(block for block in still if block < end))
