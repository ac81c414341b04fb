"""Commit view: what a rank knows of the others when it decides about a snapshot: the horizon,
which stamps are hopeless, and which steps all ranks capture.

On one node it reads the ranks' pages itself, so that capturing needs nobody else to be alive; with
many nodes it reads the leader's word, which its keeper has written into a page. Both may be old,
and old views are safe (core/resume/cut.py, core/resume/commit.py). Both tell besides what digests
of replicated state have shown (core/detection/replicas.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from keepstep.core.detection.replicas import Agreement, blame, first_difference
from keepstep.core.resume.cut import Holding, common, cut, holding_of, hopeless
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.status_page import StatusPage, status_path
from keepstep.model.replicas import ReplicaDifference
from keepstep.model.shares import ShareClass
from keepstep.model.snapshot import RankStatus, Stamp
from keepstep.ports import Memory


class CommitLook(NamedTuple):
    """What was seen: the newest stamp that everybody may rely on, whether a stamp will never be
    one, the period at which steps are captured (core/resume/cadence.py), the newest stamp that
    other nodes have whole, and the pages of this node's ranks, where they were looked at.
    `agreed_steps`, `difference`: as in `Horizon`. `classes`: replicas over nodes, as the leader has
    told; None when it has not."""

    horizon: Stamp | None
    is_hopeless: Callable[[Stamp], bool]
    period_steps: int
    released: Stamp | None = None
    agreed_steps: int = 0
    difference: ReplicaDifference | None = None
    pages: Sequence[RankStatus] = ()
    classes: tuple[ShareClass, ...] | None = None


class CommitView(Protocol):
    """What a rank may overwrite depends on this."""

    def look(self, epoch: int) -> CommitLook:
        """What holds in this epoch."""

    def close(self) -> None: ...


class _NodesPages:
    """The pages of these ranks of this node."""

    def __init__(self, memory: Memory, job_dir: Path, ranks: range) -> None:
        self._memory, self._job_dir, self._ranks = memory, job_dir, ranks
        self._pages: dict[int, StatusPage] = {}
        self._last_seen: dict[int, RankStatus] = {}

    def seen(self) -> list[RankStatus]:
        """As far as they can be read."""
        return [page for page in map(self._read, self._ranks) if page]

    def _read(self, rank: int) -> RankStatus | None:
        if rank not in self._pages:
            try:
                self._pages[rank] = StatusPage(self._memory, status_path(self._job_dir, rank))
            except (OSError, ValueError):
                return None
        # A page that cannot be read at this moment is as good as it was before: old views are safe.
        read = self._pages[rank].read() or self._last_seen.get(rank)
        if read is not None:
            self._last_seen[rank] = read
        return read

    def close(self) -> None:
        for page in self._pages.values():
            page.close()


class PagesOfOneNode:
    """Of a job whose ranks all live on this node."""

    def __init__(self, memory: Memory, job_dir: Path, world_size: int) -> None:
        self._world_size = world_size
        self._pages = _NodesPages(memory, job_dir, range(world_size))
        self._agreement = Agreement(-1)

    def look(self, epoch: int) -> CommitLook:
        seen = self._pages.seen()
        holdings = [holding_of(page) for page in seen]
        return CommitLook(
            cut(holdings, self._world_size),
            lambda stamp: hopeless(stamp, holdings, self._world_size),
            self._period_steps(seen),
            None,  # nobody else has anything
            *self._compare(epoch, holdings),
            pages=seen,
        )

    def _compare(self, epoch: int, holdings: list[Holding]) -> tuple[int, ReplicaDifference | None]:
        """At how many steps of this epoch replicas agreed, and where they do not."""
        if self._agreement.epoch != epoch:
            self._agreement = Agreement(epoch)
        if len(holdings) < self._world_size or not any(h.group for h in holdings):
            return self._agreement.steps, None
        shared = common([h.sealed for h in holdings])
        stamp = first_difference(holdings, shared)
        if stamp is None:
            return self._agreement.saw(holdings, shared), None
        return self._agreement.steps, blame(dict(enumerate(holdings)), stamp)

    def _period_steps(self, seen: list[RankStatus]) -> int:
        if self._world_size == 1:
            return 1  # nobody to agree with: as soon as the last one is sealed
        return max((page.span_steps for page in seen), default=1)

    def close(self) -> None:
        self._pages.close()


class LeadersWord:
    """Of a job with many nodes: the page that this node's keeper writes. `ranks`: those of this
    node that share snapshots, whose pages are looked at, too. `has_classes`: ranks share them over
    nodes."""

    def __init__(
        self,
        memory: Memory,
        job_dir: Path,
        ranks: range = range(0),
        has_classes: bool = False,
    ) -> None:
        self._has_classes = has_classes
        self._page = HorizonPage(memory, job_dir)
        self._pages = _NodesPages(memory, job_dir, ranks)

    def look(self, epoch: int) -> CommitLook:
        horizon = self._page.read(epoch)
        return CommitLook(
            horizon.floor,
            horizon.is_hopeless,
            horizon.period_steps,
            horizon.released,
            horizon.agreed_steps,
            horizon.difference,
            self._pages.seen(),
            self._page.classes(epoch) if self._has_classes else None,
        )

    def close(self) -> None:
        self._page.close()
        self._pages.close()
