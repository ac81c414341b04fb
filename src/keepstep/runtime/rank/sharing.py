"""Sharing: one snapshot among the replicas of a node (REFT's sharded snapshot).

    every rank keeps all of its own -> a step that all hold tells who are replicas: the plan ->
    all replicas show the same plan on their pages -> each keeps its share, and the checksums of all
    -> replicas differ at a step, or the state has another shape -> everything again

Comes in: the ranks' pages at step boundaries, the slots of a step that all hold. Goes out: which
blocks the next snapshot of this rank need not have, and what its page tells of that. Decides
nothing about who keeps what: `core/redundancy/shares.py` does. Never waits for another rank.

Invariant: a block is left to others only while all replicas showed the same plan; what they have
sealed then counts for nobody unless all of them tell the same checksums (`core/resume/cut.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from keepstep.core.redundancy.shares import RankBlocks, SharePlan, plan_of, resolved
from keepstep.core.resume.cut import Holding, agree, common, holding_of
from keepstep.edge.shm.slot import Slot, readable_headers
from keepstep.edge.shm.slot_header import MOST_BLOCKS
from keepstep.edge.shm.status_page import StatusPage
from keepstep.errors import DamageError
from keepstep.model.events import WARNING
from keepstep.model.layout import Layout
from keepstep.model.shares import RankRun, Share, blocks_of
from keepstep.model.snapshot import RankStatus, SlotState, Stamp
from keepstep.model.units import first_names, human_bytes
from keepstep.ports import Acts, Gathered, Memory
from keepstep.runtime.rank.commit_view import CommitLook, LeadersWord
from keepstep.runtime.rank.guarded import FailedWork, guarded
from keepstep.runtime.rank.manifests import still_in
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld
from keepstep.runtime.slot_locks import pin_one, unpin

# so many steps pass before ranks that are no replicas, or have differed, are compared again; twice
# as many each time
PAUSE_STEPS = 16
MOST_PAUSE_STEPS = 4096

NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ShareOrder:
    """How the next snapshot is shared. `lacking`: blocks that it leaves to others."""

    plan: SharePlan
    lacking: frozenset[int]

    @property
    def blocks(self) -> tuple[frozenset[int], frozenset[int]]:
        """Those that it leaves to others, and all that are shared."""
        return self.lacking, self.plan.shared

    def share(self, sums: Sequence[int]) -> Share:
        """What is told of it, by the checksums of all its blocks."""
        return self.plan.share(sums, bool(self.lacking))


@dataclass(frozen=True)
class _FoundPlan:
    """What the slots of one step tell. `plan`: None when this rank has no replica; `layout`: of its
    own slot; `has_none`: it has no block that might be shared."""

    plan: SharePlan | None
    layout: Layout | None
    has_none: bool = False


class Sharing:
    """One rank's. `is_on`: whether it is asked for, and can be had."""

    def __init__(
        self, world: RankWorld, options: RankOptions, who: RankIdentity, page: StatusPage
    ) -> None:
        self._world, self._options, self._who, self._page = world, options, who, page
        self._ranks = shared_among(options, who)
        self.is_on = bool(self._ranks)
        self._plan: SharePlan | None = None
        # the last one that was given up: whoever still goes by it is told that this rank has all
        self._former: SharePlan | None = None
        self._is_former_over = True  # all have given it up
        self._layout: Layout | None = None  # that they are about
        self._lacked = NOTHING  # what others keep for this rank, once all go by the plan
        self._is_agreed = False
        self._agreed_step = -1  # what a page told before this step is not about the plan
        self._life = 0  # what was found out for an earlier one counts for nothing
        self._is_looking = False
        self._next_step = -1  # no replicas are looked for before
        self._pause_steps = PAUSE_STEPS
        self._differed = Stamp(-1, 0)  # the newest stamp of which that was told
        self._told_none = False
        self._had_differed: Stamp | None = None  # before this life
        self._is_digested = False  # some of what is shared never leaves a device

    @property
    def lacking(self) -> frozenset[int]:
        """The blocks that lie with other ranks, as far as is agreed."""
        return self._lacked if self._is_agreed else NOTHING

    def tell_why_not(self) -> None:
        """Once, where it is asked for and cannot be had."""
        why = "" if self._options.share_replicas == "off" else _why_not(self._options, self._who)
        if why and self._who.rank == 0:
            self._world.journal.record("not-shared", f"snapshots are not shared: {why}", WARNING)

    # -- lives

    def forget(self) -> None:
        """Another vote begins: what all resume from tells who are replicas."""
        self._drop()
        self._former = None
        self._is_former_over = True
        self._next_step = -1
        self._pause_steps = PAUSE_STEPS
        self._told_none = False
        if self.is_on:  # a vote after that one may find nothing left of it
            self._had_differed = self._find_left_differing() or self._had_differed

    def _find_left_differing(self) -> Stamp | None:
        """A stamp that all ranks have sealed as one to share, and not as the same: what they leave
        behind at the end of a life. Looked for before anybody gives up what is newer than what all
        resume from."""
        memory, job_dir, job = self._world.memory, self._options.job_dir, self._who.job_hash
        holdings = []
        for rank in self._ranks:
            told = [h for h in readable_headers(memory, job_dir, rank) if h.job_hash == job]
            sealed = [header for header in told if header.state is SlotState.SEALED]
            shares = tuple((h.stamp, h.share) for h in sealed if h.share is not None)
            stamps = frozenset(header.stamp for header in sealed)
            holdings.append(Holding(stamps, None, -1, shares=shares))
        everywhere = common([holding.sealed for holding in holdings])
        return max((s for s in everywhere if not agree(s, holdings)), default=None)

    def resumed(self, stamp: Stamp, replicas: tuple[RankRun, ...] | None = ()) -> Acts[None]:
        """All ranks have loaded that stamp from memory, and none has gone on yet: all find the same
        plan in it, and need not hear of each other before they go by it. `replicas`: ranks of
        several nodes that share it, which is nothing to those of one."""
        if not self.is_on:
            return
        yield
        if self._had_differed is not None:
            # Whoever differs may do so again, and before a job's end nobody would see it in time:
            # the last steps were nobody's in every life, and the next one began where this one did.
            self._next_step = stamp.step + self._pause_steps
            if self._who.rank == self._ranks[0]:
                why = (
                    f"replicas had differed, so what was shared of {self._had_differed} is with "
                    f"nobody: each rank keeps all of its own until step {self._next_step}"
                )
                self._world.journal.record("not-shared", why, step=stamp.step)
            return
        found = yield from guarded(self._find(stamp))
        if isinstance(found, FailedWork) or found is None or found.plan is None:
            return
        self._adopt(found.plan, found.layout)
        self._is_agreed = True
        self._agreed_step = stamp.step

    def _adopt(self, plan: SharePlan, layout: Layout | None) -> None:
        self._plan, self._former, self._layout = plan, None, layout
        self._is_former_over = True
        self._lacked = plan.lacked_by(self._who.rank)
        self._page.publish(share_plan=plan.number)

    def _drop(self) -> None:
        self._life += 1
        self._is_looking = False
        self._is_agreed = False
        self._agreed_step = -1
        if self._plan is not None:
            self._plan, self._former = None, self._plan
            self._is_former_over = False
            self._page.publish(share_plan=0)

    # -- at a boundary

    def boundary(self, step: int, seen: CommitLook) -> None:
        """By the pages of all ranks, as far as they can be read, and what all of them hold."""
        if not self.is_on:
            return
        pages, horizon = seen.pages, seen.horizon
        plan = self._plan
        if plan is None:
            if not self._have_all_given_up(pages):
                return
            if horizon is not None and horizon.step >= self._next_step and not self._is_looking:
                self._look(horizon)
            return
        members = [page for page in pages if page.rank in plan.members]
        told = {page.rank: page.share_plan for page in members}
        if not self._is_agreed:
            if set(told.values()) == {plan.number} and len(told) == len(plan.members):
                self._agree(plan)
            elif any(number not in (0, plan.number) for number in told.values()):
                self._drop()  # they have looked at another step, and found something else
                self._next_step = step
            return
        gone = [
            page.rank
            for page in members
            if page.share_plan != plan.number and page.decided_step > self._agreed_step
        ]
        differed = self._newest_differing(members)
        if differed is not None:
            self._tell_difference(plan, differed)
            self._pause(step)
        elif gone:
            self._pause(step)

    def _have_all_given_up(self, pages: Sequence[RankStatus]) -> bool:
        """Whether nobody goes by the former plan any more. Until then this rank tells of that one,
        else what they leave to it would be nobody's; and no step is looked at that they may have
        decided about by it."""
        if self._is_former_over or self._former is None:
            return True
        members = [page for page in pages if page.rank in self._former.members]
        if any(page.share_plan == self._former.number for page in members):
            return False
        self._is_former_over = True
        decided = max((page.decided_step for page in members), default=-1)
        self._next_step = max(self._next_step, decided + 1)
        return True

    def _agree(self, plan: SharePlan) -> None:
        self._is_agreed = True
        if self._who.rank != plan.members[0]:
            return
        shared = human_bytes(len(plan.blocks) * plan.block_bytes)
        ranks = ", ".join(map(str, plan.members))
        why = (
            f"ranks {ranks} hold the same {shared}: from here on each keeps 1/{len(plan.members)} "
            "of that, and the checksums of all"
        )
        self._world.journal.record(
            "shared", why, ranks=list(plan.members), nbytes=len(plan.blocks) * plan.block_bytes
        )

    def _newest_differing(self, members: Sequence[RankStatus]) -> Stamp | None:
        """The newest stamp that all replicas have sealed as one to share, and not as the same."""
        holdings = [holding_of(page) for page in members]
        everywhere = common([[stamp for stamp, _ in holding.shares] for holding in holdings])
        found = [s for s in everywhere if s > self._differed and not agree(s, holdings)]
        return max(found, default=None)

    def _pause(self, step: int) -> None:
        """Everybody keeps everything for a while."""
        self._drop()
        self._next_step = step + self._pause_steps
        self._pause_steps = min(2 * self._pause_steps, MOST_PAUSE_STEPS)

    # -- a snapshot

    def order(self, gathered: Gathered, still: frozenset[int]) -> ShareOrder | None:
        """Of the next snapshot; None when it is this rank's alone. `still`: see `LiveState`."""
        plan = self._plan
        has_shape = gathered.layout == self._layout
        if has_shape:
            self._layout = gathered.layout  # the same object is compared at once the next time
        if plan is None:
            former = self._former if has_shape else None
            return None if former is None else ShareOrder(former, NOTHING)
        if not has_shape or not still.issuperset(plan.blocks):
            why = (
                "the tensors of the state are others than those that replicas share, or some of "
                "them no longer stand still between updates: each rank keeps its own until they "
                "are compared anew"
            )
            self._world.journal.record("not-shared", why, rank=self._who.rank)
            self._drop()
            return ShareOrder(plan, NOTHING) if has_shape else None
        return ShareOrder(plan, self.lacking)

    def share(
        self, order: ShareOrder | None, sums: Sequence[int], digests: Mapping[int, int]
    ) -> Share | None:
        """What is told of a snapshot: see `StateCopy.digests`. In the background."""
        self._is_digested = bool(digests)  # as told to who looks for the tensors that differ
        if order is None:
            return None
        return order.share([digests.get(block, found) for block, found in enumerate(sums)])

    # -- looking into slots

    def _look(self, stamp: Stamp) -> None:
        life = self._life
        self._is_looking = True

        def found(result: _FoundPlan | FailedWork | None) -> None:
            if self._life != life:
                return
            self._is_looking = False
            if isinstance(result, FailedWork):
                why = f"replicas cannot be looked for: {result.why}"
                self._world.journal.record("not-shared", why, WARNING, rank=self._who.rank)
                self._pause(stamp.step)
            elif result is None:
                self._next_step = stamp.step + 1  # it was overwritten meanwhile
            elif result.plan is None:
                self._tell_none(stamp, result.has_none)
                self._pause(stamp.step)
            else:
                self._adopt(result.plan, result.layout)

        self._world.aside.act(guarded(self._find(stamp)), found)

    def _tell_none(self, stamp: Stamp, has_none: bool) -> None:
        if self._told_none:
            return
        self._told_none = True
        why = (
            f"rank {self._who.rank} shares nothing: at {stamp} no other rank of this node has "
            "equal blocks of what its optimizers own"
        )
        if has_none:
            size = human_bytes(self._world.memory.block_bytes)
            why = (
                f"rank {self._who.rank} has nothing to share: no block of {size} holds nothing but "
                "what its optimizers own and the background copies. With lazy=False none does, nor "
                "where an optimizer has no fence"
            )
        self._world.journal.record("not-shared", why, rank=self._who.rank)

    def _find(self, stamp: Stamp) -> Acts[_FoundPlan | None]:
        """What the slots of this node's ranks tell; None when one of them is not there any more."""
        told: list[RankBlocks] = []
        seen: dict[bytes, tuple[Layout, frozenset[int]]] = {}
        for rank in self._ranks:
            yield
            slot = pin_one(self._world.memory, self._options.job_dir, stamp, rank)
            if slot is None:
                return None
            try:
                told.append(blocks_in_slot(slot, rank, seen))
            except (DamageError, LookupError):
                return None
            finally:
                unpin([slot])
        yield
        whole = resolved(told)
        if whole is None:
            return None
        own = next((one for one in whole if one.rank == self._who.rank), None)
        plan = plan_of(self._who.rank, whole)
        if own is None or plan is None or plan.blocks[-1] >= MOST_BLOCKS:
            return _FoundPlan(None, None, has_none=own is not None and not own.still)
        return _FoundPlan(plan, own.layout)

    def _tell_difference(self, plan: SharePlan, stamp: Stamp) -> None:
        """Which tensors differ, by the tables: whoever still finds all of them tells it. The others
        may have overwritten theirs already, which are nobody's."""
        self._differed = stamp
        tables: dict[int, Sequence[int]] = {}
        for rank in () if self._is_digested else plan.members:
            slot = pin_one(self._world.memory, self._options.job_dir, stamp, rank)
            if slot is not None:
                with suppress(DamageError):
                    tables[rank] = slot.table(slot.header())
                unpin([slot])
        found = _differences(plan, tables, self._layout)
        if found or self._who.rank == plan.members[0]:
            ranks = ", ".join(map(str, plan.members))
            unnamed = f"ranks {ranks} differ"
            if self._is_digested:
                unnamed += " (nobody can say in what: their devices compared digests)"
            why = (
                f"{stamp} is not shared, so nobody holds it: {found or unnamed}. "
                "Replicas are to be equal after every update; each rank keeps all of its own from "
                "here on"
            )
            self._world.journal.record(
                "not-shared", why, WARNING, rank=self._who.rank, step=stamp.step
            )


def _differences(
    plan: SharePlan, tables: Mapping[int, Sequence[int]], layout: Layout | None
) -> str:
    """In words; empty where the tables of some members are missing."""
    if layout is None or len(tables) < len(plan.members):
        return ""
    first, *others = plan.members
    lines = []
    for other in others:
        blocks = set(plan.differing(tables[first], tables[other]))
        size = plan.block_bytes
        names = [
            s.spec.name
            for s in layout.segments
            if s.spec.nbytes
            and not blocks.isdisjoint(range(s.offset // size, (s.end - 1) // size + 1))
        ]
        if names:
            lines.append(
                f"rank {other} differs from rank {first} in blocks of {first_names(names)}"
            )
    return "; ".join(lines)


def shares_over_nodes(options: RankOptions, who: RankIdentity) -> bool:
    """Whether replicas of all nodes keep one snapshot between them."""
    return options.share_replicas == "job" and who.has_many_nodes and options.slots != 1


def leaders_word(memory: Memory, options: RankOptions, who: RankIdentity) -> LeadersWord:
    """What a rank of a job with many nodes knows of the others, by what it shares."""
    ranks, is_over_nodes = shared_among(options, who), shares_over_nodes(options, who)
    return LeadersWord(memory, options.job_dir, ranks, is_over_nodes)


def shared_among(options: RankOptions, who: RankIdentity) -> range:
    """The ranks of this node that may keep one snapshot between them, this one among them; empty
    where nothing is shared."""
    is_on = options.share_replicas != "off" and not _why_not(options, who)
    if shares_over_nodes(options, who):
        return range(0)
    return who.node_ranks if is_on else range(0)


def _why_not(options: RankOptions, who: RankIdentity) -> str:
    """Why nothing can be shared; empty where it can."""
    if shares_over_nodes(options, who):
        return ""
    if who.local_world_size == 1:
        return "there is no other rank" + (" on this node" if who.has_many_nodes else "")
    if not who.has_many_nodes:
        return ""
    if not who.node_ranks:
        return "neither LOCAL_RANK nor SLURM_LOCALID says which ranks live on this node"
    if options.slots == 1:
        return "with one slot a rank overwrites what others on its node would lean on"
    return ""


def blocks_in_slot(
    slot: Slot, rank: int, seen: dict[bytes, tuple[Layout, frozenset[int]]]
) -> RankBlocks:
    """What it tells, block by block. Raises DamageError, LookupError."""
    header = slot.verify_frame()
    text = slot.manifest_text(header)
    if text not in seen:  # replicas have the same
        seen[text] = slot.manifest(header), still_in(text, str(slot.path))
    layout, still = seen[text]
    sums, lacking = slot.table(header), blocks_of(header.lacking)
    share = header.share if header.is_digested else None
    size, payload = header.block_bytes, header.payload_bytes
    return RankBlocks(rank, layout, size, sums, still, lacking, share, payload)
