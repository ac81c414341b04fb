"""Restoring: brings snapshots back to this node from the memory of others: to resume from, or in
place of one that was damaged here.

Comes in: what every node has told it holds, and which ranks need which stamp. Goes out: what each
rank can be given, and sealed slots. Which stamp everybody resumes from is the election's to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keepstep.config import Settings
from keepstep.core.resume.sources import restorable_by_rank, restore_sources
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.errors import DamageError
from keepstep.model.mesh import Mesh
from keepstep.model.restore_sources import HeldSnapshot, Inventory, RestoreSource
from keepstep.model.snapshot import Stamp
from keepstep.model.units import human_bytes, human_ns
from keepstep.runtime.replication.fetch import Fetched, Fetching, replace_bytes
from keepstep.runtime.replication.owner import Owner
from keepstep.runtime.replication.peer_inbox import PeerInbox
from keepstep.runtime.replication.serve import Supplier
from keepstep.runtime.world import World


class Restoring:
    """One node's. `mesh` is that of the present round."""

    mesh: Mesh

    def __init__(
        self,
        world: World,
        settings: Settings,
        lines: PeerInbox,
        job_hash: bytes,
        supplier: Supplier,
        owner: Owner,
    ) -> None:
        self._world, self._memory, self._journal = world, world.memory, world.journal
        self._settings, self._lines, self._job_hash = settings, lines, job_hash
        self._supplier, self._owner = supplier, owner
        self._fetches: dict[int, Fetching] = {}
        # own slots that stand still while their bytes are brought back
        self._mending: dict[int, Slot] = {}
        self._inventories: dict[int, Inventory] = {}
        # fetches whose sources cannot be reached
        self._stranded: dict[int, tuple[RestoreSource, Stamp, Callable[[str | None], None]]] = {}

    def begin(self, mesh: Mesh) -> None:
        """Another round."""
        self.mesh = mesh
        for fetching in self._fetches.values():
            fetching.stop()
        for slot in self._mending.values():
            _release(slot)
        self._fetches.clear()
        self._mending.clear()
        self._inventories.clear()
        self._stranded.clear()

    # -- what there is

    def told(self, node: int, inventory: Inventory) -> None:
        self._inventories[node] = inventory

    def silent_nodes(self) -> frozenset[int]:
        return frozenset(m.node for m in self.mesh.members if m.node not in self._inventories)

    def elsewhere(self, proven: Mapping[int, frozenset[Stamp]]) -> dict[int, frozenset[Stamp]]:
        """What each rank can be given. `proven`: what ranks that have joined hold themselves."""
        return restorable_by_rank(range(self.mesh.world_size), self._believed(proven))

    def sources(
        self, wanted: list[int], stamp: Stamp, proven: Mapping[int, frozenset[Stamp]]
    ) -> dict[int, RestoreSource]:
        return restore_sources(wanted, stamp, self._believed(proven))

    def _believed(self, proven: Mapping[int, frozenset[Stamp]]) -> dict[int, Inventory]:
        believed = dict(self._inventories)
        for rank, stamps in proven.items():
            node = self.mesh.node_of[rank]
            if node in believed:
                old = believed[node]
                believed[node] = Inventory(
                    old.snapshots | {HeldSnapshot(rank, stamp) for stamp in stamps}, old.parities
                )
        return believed

    # -- bringing it

    def link_with_sources(self, found: Mapping[int, RestoreSource]) -> None:
        """Everybody makes the links that restoring needs: the asking and the giving end. What was
        wanted before is wanted no more."""
        self._stranded.clear()
        for rank, source in found.items():
            givers = {*source.copies, *(node for _, node in source.members)}
            if self.mesh.node_of[rank] == self.mesh.node:
                self._lines.link_with(givers, to_restore=True)
            elif self.mesh.node in givers:
                self._lines.link_with({self.mesh.node_of[rank]}, to_restore=True)

    def fetch(
        self, source: RestoreSource, stamp: Stamp, then: Callable[[str | None], None]
    ) -> None:
        """Bring that rank's snapshot here; `then` hears None, or why it cannot be had. That a
        source cannot be reached is no reason: then another round will come, or the link be open
        again, and it is fetched anew."""

        def ended(fetched: Fetched) -> None:
            if self._fetches.get(source.rank) is fetching:
                del self._fetches[source.rank]
            self._tell_fetched(fetched)
            if fetched.is_away and fetched.why is not None:
                self._stranded[source.rank] = (source, stamp, then)
            else:
                then(fetched.why)

        known = self._fetches.pop(source.rank, None)
        if known is not None:
            known.stop()
        fetching = Fetching(
            *(self._world, self._lines, self._supplier, self._settings.job_dir, self._job_hash),
            *(source, stamp, ended),
        )
        self._fetches[source.rank] = fetching
        fetching.start()

    def _tell_fetched(self, f: Fetched) -> None:
        data: dict[str, Any] = {
            "rank": f.rank,
            "step": f.stamp.step,
            "nbytes": f.nbytes,
            "sources": list(f.sources),
            "took_ns": f.took_ns,
        }
        how = (
            f"{human_bytes(f.nbytes)} from node{'s' if len(f.sources) > 1 else ''} "
            f"{', '.join(map(str, f.sources))}"
        )
        if f.why is None:
            self._journal.record(
                "fetched", f"{f.stamp} of rank {f.rank}: {how} in {human_ns(f.took_ns)}", **data
            )
        else:
            self._journal.record(
                "fetch-failed",
                f"{f.stamp} of rank {f.rank} cannot be had from memory: {f.why}",
                **data,
            )

    def mend(self, rank: int, index: int, stamp: Stamp, then: Callable[[str | None], None]) -> None:
        """Bring a rank's own damaged snapshot back from its holders, in place; `then` hears None,
        or why not."""
        source = self._owner.source_of(rank, stamp)
        if source is None or rank in self._fetches:
            then("no other node has proven a copy of it")
            return
        target = slot_path(self._settings.job_dir, rank, index)
        try:
            slot = Slot(self._memory, target)
        except (DamageError, OSError) as error:
            then(f"it cannot even be opened: {error}")
            return
        if not slot.lock(exclusive=False):
            slot.close()
            then("it is being overwritten")
            return
        self._mending[rank] = slot
        spare = target.with_name("mended")

        def ended(fetched: Fetched) -> None:
            self._fetches.pop(rank, None)
            self._tell_fetched(fetched)
            why = fetched.why
            if why is None:
                why = replace_bytes(self._memory, slot, spare)
                self._memory.remove(spare)
            _release(self._mending.pop(rank))
            then(why)

        fetching = Fetching(
            *(self._world, self._lines, self._supplier, self._settings.job_dir, self._job_hash),
            *(source, stamp, ended, spare),
        )
        self._fetches[rank] = fetching
        fetching.start()

    # -- what others say

    def failed(self, node: int, rank: int, stamp: Stamp, why: str) -> bool:
        """A node cannot give what was asked of it; False when nothing of that snapshot is being
        fetched."""
        waiting = [
            f
            for f in self._fetches.values()
            if f.stamp == stamp and rank in (f.source.rank, *f.source.stripe_group)
        ]
        for fetching in waiting:
            fetching.source_failed(node, why)
        return bool(waiting)

    def link_is_open(self, node: int) -> None:
        """What could not be had from there, perhaps now can."""
        again = [
            entry
            for entry in self._stranded.values()
            if node in (*entry[0].copies, *(n for _, n in entry[0].members))
        ]
        for source, stamp, then in again:
            del self._stranded[source.rank]
            self.fetch(source, stamp, then)

    def link_is_dead(self, node: int, why: str) -> None:
        for fetching in list(self._fetches.values()):
            fetching.link_is_dead(node, why)


def _release(slot: Slot) -> None:
    slot.unlock()
    slot.close()
