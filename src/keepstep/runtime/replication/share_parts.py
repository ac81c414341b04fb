"""Share parts: what ranks of other nodes keep for this node's ranks, brought here to resume from.

Comes in: who shares what was offered, and where each part of it comes from. Goes out: sealed slots
below `shared`, where `edge/shm/whole.py` finds them beside what rests here anyway; they go when all
train on. One after the other: a slot takes the memory of the whole until its holes are made, and
what is decoded asks for bytes of snapshots that are parts themselves.

Invariant: what was brought for an offer that is given up is stopped and removed first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from keepstep.edge.shm.slot import slot_path
from keepstep.edge.shm.whole import SHARED
from keepstep.model.mesh import Mesh
from keepstep.model.restore_sources import RestoreSource, SharedSources
from keepstep.model.snapshot import Stamp
from keepstep.ports import Memory
from keepstep.runtime.replication.recovery import SnapshotRecovery, Then


class ShareParts:
    """One node's, in one mesh."""

    def __init__(
        self, memory: Memory, job_dir: Path, mesh: Mesh, recovery: SnapshotRecovery
    ) -> None:
        self._memory, self._root, self._mesh = memory, job_dir / SHARED, mesh
        self._recovery = recovery
        self._waiting: deque[RestoreSource] = deque()
        self._coming: int | None = None  # the rank whose part is on its way

    @property
    def is_bringing(self) -> bool:
        """Whether any part is on its way: what others offer to rest here waits meanwhile."""
        return self._coming is not None

    def are_on_one(self, ranks: Sequence[int]) -> bool:
        """Whether all of them live on one node."""
        return len({self._mesh.node_of[rank] for rank in ranks}) == 1

    def bring(self, shared: Sequence[SharedSources], stamp: Stamp, then: Then) -> None:
        """Of what ranks here share; `then` hears None, or what cannot be had. Every node makes the
        links that it needs for what others bring."""
        self.forget()
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
        self._go_on(stamp, then)

    def _go_on(self, stamp: Stamp, then: Then) -> None:
        if not self._waiting:
            then(None)
            return
        source = self._waiting.popleft()

        def came(why: str | None) -> None:
            self._coming = None
            if why is None:
                self._go_on(stamp, then)
            else:
                self._waiting.clear()
                then(f"rank {source.rank} keeps a part of it, and {why}")

        self._coming = source.rank
        self._recovery.fetch(source, stamp, came, slot_path(self._root, source.rank, 0))

    def forget(self) -> None:
        """All train on, or what was offered is given up."""
        if self._coming is not None:
            self._recovery.stop(self._coming)
            self._coming = None
        self._waiting.clear()
        self._memory.remove(self._root)
