"""Share parts: what ranks of other nodes keep for this node's ranks, brought here to resume from,
or to write a checkpoint.

Comes in: who shares a snapshot, and where each part of it comes from. Goes out: sealed slots below
`shared`, where `edge/shm/whole.py` finds them; they go when all train on, or when this node's part
of the checkpoint is written. One after the other: a slot takes the memory of the whole until its
holes are made, and what is decoded asks for bytes of snapshots that are parts themselves.

Invariants: what is brought to resume from is never given up for a checkpoint; who waits for parts
hears of it once, unless it gives up itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from keepstep.core.redundancy.share_classes import class_of
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.slot import readable_headers, slot_path
from keepstep.edge.shm.whole import SHARED
from keepstep.model.mesh import Mesh
from keepstep.model.restore_sources import RestoreSource, SharedSources
from keepstep.model.shares import ShareClass, is_same_share
from keepstep.model.snapshot import SlotHeader, SlotState, Stamp
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Timer
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.recovery import SnapshotRecovery, Then

# so often a checkpoint's part is looked after: one whose source cannot be reached is given up
LOOK_NS = 15 * S_NS
COMMITTED_AGAIN_NS = 50 * MS_NS  # whether it is committed is asked


class ShareParts:
    """One node's, in one mesh. `rests_here`: whether a copy of a rank's snapshot does; `page`: on
    which this node's classes are; `is_over_nodes`: ranks go by these."""

    def __init__(
        self,
        world: KeeperWorld,
        job_dir: Path,
        mesh: Mesh,
        recovery: SnapshotRecovery,
        rests_here: Callable[[int, Stamp], bool],
        page: HorizonPage,
        is_over_nodes: bool,
    ) -> None:
        self._memory, self._timers = world.memory, world.timers
        self._job_dir, self._root, self._mesh = job_dir, job_dir / SHARED, mesh
        self._recovery, self._rests_here, self._page = recovery, rests_here, page
        self._is_over_nodes = is_over_nodes
        self._waiting: deque[RestoreSource] = deque()
        self._coming: int | None = None  # the rank whose part is on its way
        self._then: Then | None = None  # who waits
        self._user: Literal["", "vote", "store"] = ""  # of what was brought last
        self._attempt = -1  # to store it
        self._timer: Timer | None = None

    @property
    def is_bringing(self) -> bool:
        """Whether any part is on its way: what others offer to rest here waits meanwhile."""
        return self._coming is not None

    def are_on_one(self, ranks: Sequence[int]) -> bool:
        """Whether all of them live on one node."""
        return len({self._mesh.node_of[rank] for rank in ranks}) == 1

    # -- to resume from

    def bring(self, shared: Sequence[SharedSources], stamp: Stamp, then: Then) -> None:
        """Of what ranks here share; `then` hears None, or what cannot be had. Every node makes the
        links that it needs for what others bring."""
        self._stop("all resume")
        self._user, self._then = "vote", then
        # A node that was not there when the leader told of them may be asked to store just this,
        # where no step follows: the leader makes classes anew once all have passed a boundary.
        classes = [ShareClass(each.runs, told=0) for each in shared]
        self._page.write_classes(stamp.epoch, classes, self._mesh.ranks_of(self._mesh.node))
        here, node_of = self._mesh.node, self._mesh.node_of
        for each in shared:
            homes = {node_of[part.rank] for part in each.parts}
            for part in each.parts:
                self._recovery.link(part, homes - {node_of[part.rank], *part.copies})
            if here in homes:
                self._waiting.extend(
                    part
                    for part in each.parts
                    # a copy that rests here is found where it is
                    if node_of[part.rank] != here and here not in part.copies
                )
        self._go_on(stamp)

    def resumed(self) -> None:
        """All train on, perhaps from before what was to be written."""
        self._stop("all have resumed")

    # -- to write a checkpoint

    def bring_to_store(self, stamp: Stamp, attempt: int, then: Then) -> None:
        """What ranks here lack of that snapshot, from those that live, once it is committed: before
        that copies of it are on their way, whose bytes would be taken for these. Nothing that rests
        here is leant on where it is: it is overwritten meanwhile. As `bring`, by every node."""
        if not self._is_over_nodes:
            then(None)
            return
        if self._user == "vote":
            then("what all resume from is here for that")
            return
        self._stop("another checkpoint begins")
        self._user, self._attempt, self._then = "store", attempt, then
        self._when_committed(stamp)

    def _when_committed(self, stamp: Stamp) -> None:
        known = self._page.last()
        if known.floor is not None and known.floor >= stamp:
            self._bring_committed(stamp)
        elif known.is_hopeless(stamp):
            self._end(f"{stamp} will never be committed")
        else:
            again = partial(self._when_committed, stamp)
            self._timer = self._timers.after(COMMITTED_AGAIN_NS, again)

    def _bring_committed(self, stamp: Stamp) -> None:
        here, classes = self._mesh.node, self._page.last_classes()
        wanted: dict[int, RestoreSource] = {}
        for rank in self._mesh.ranks_of(here):
            known = class_of(rank, classes)
            if known is None:
                if self._lacks(rank, stamp) and not self._is_all_here(rank, stamp):
                    self._end(f"nobody has told with whom rank {rank} shares it")
                    return
                continue
            sources = {each: self._from_home(each, stamp) for each in known.members}
            homes = {self._mesh.node_of[each] for each in known.members}
            for source in sources.values():
                self._recovery.link(source, homes, is_needed=False)
            if self._lacks(rank, stamp):
                wanted |= {r: s for r, s in sources.items() if self._mesh.node_of[r] != here}
        self._waiting.extend(wanted.values())
        self._look_after(stamp)
        self._go_on(stamp)

    def _lacks(self, rank: int, stamp: Stamp) -> bool:
        return any(header.lacking for header in self._sealed(rank, stamp))

    def _is_all_here(self, rank: int, stamp: Stamp) -> bool:
        """Whether all who share it live on this node: an offer names only those of several."""
        here = self._mesh.ranks_of(self._mesh.node)
        told = {each: header.share for each in here for header in self._sealed(each, stamp)}
        own = told.get(rank)
        alike = [share for share in told.values() if is_same_share(share, own)]
        return own is not None and len(alike) >= own.ranks

    def _sealed(self, rank: int, stamp: Stamp) -> list[SlotHeader]:
        headers = readable_headers(self._memory, self._job_dir, rank)
        return [h for h in headers if (h.state, h.stamp) == (SlotState.SEALED, stamp)]

    def _from_home(self, rank: int, stamp: Stamp) -> RestoreSource:
        home, here = self._mesh.node_of[rank], self._mesh.node
        has_copy = home != here and self._rests_here(rank, stamp)
        return RestoreSource(rank, (home, here) if has_copy else (home,))

    def _look_after(self, stamp: Stamp) -> None:
        """Slots of all nodes stand still for this."""

        def look() -> None:
            if self._coming is not None and self._recovery.is_stranded(self._coming):
                self._end(f"the node of rank {self._coming} cannot be reached")
            elif self._coming is not None:
                self._look_after(stamp)

        self._timer = self._timers.after(LOOK_NS, look)

    def give_back(self, attempt: int) -> None:
        """This node's part of that checkpoint is written, or is not going to be."""
        if self._user == "store" and self._attempt == attempt:
            self.end()

    # -- either

    def _go_on(self, stamp: Stamp) -> None:
        if not self._waiting:
            self._end(None)
            return
        source = self._waiting.popleft()

        def came(why: str | None) -> None:
            self._coming = None
            if why is None:
                self._go_on(stamp)
            else:
                self._end(f"rank {source.rank} keeps a part of it, and {why}")

        self._coming = source.rank
        self._recovery.fetch(source, stamp, came, slot_path(self._root, source.rank, 0))

    def _end(self, why: str | None) -> None:
        """Who waits hears it."""
        self._waiting.clear()
        if self._coming is not None:
            self._recovery.stop(self._coming)
            self._coming = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        then, self._then = self._then, None
        if then is not None:
            then(why)

    def _stop(self, why: str) -> None:
        """What is on its way is given up, and what was brought goes."""
        self._user = ""
        self._end(why)
        self._memory.remove(self._root)

    def end(self) -> None:
        """What was brought goes; who waits, if anybody, knows."""
        self._then = None
        self._stop("")
