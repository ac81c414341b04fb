"""Recovery: brings snapshots back to this node from the memory of others: to resume from, or in
place of one that was damaged here.

Comes in: what every node has told it holds, and which ranks need which stamp. Goes out: what each
rank can be given, and sealed slots. Which stamp everybody resumes from is the vote's to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from keepstep.core.resume.sources import restorable_by_rank, restore_sources
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.errors import DamageError
from keepstep.model.restore_sources import HeldSnapshot, Inventory, RestoreSource
from keepstep.model.shares import Share
from keepstep.model.snapshot import Stamp
from keepstep.model.units import human_bytes, human_ns
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.fetch import Fetch, FetchResult, replace_bytes
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.owner import Owner
from keepstep.runtime.replication.repair_sums import RepairSums
from keepstep.runtime.replication.serve import SnapshotServer

Then = Callable[[str | None], None]  # hears None, or why it cannot be had


class _Stranded(NamedTuple):
    """A fetch whose sources could not be reached."""

    source: RestoreSource
    stamp: Stamp
    then: Then
    path: Path | None


class SnapshotRecovery:
    """One node's, in one mesh."""

    def __init__(
        self,
        world: KeeperWorld,
        links: MeshLinks,
        job_dir: Path,
        job_hash: bytes,
        server: SnapshotServer,
        repair_sums: RepairSums,
        owner: Owner,
        has_one_slot: bool = False,
    ) -> None:
        """has_one_slot: what is fetched to resume from takes the rank's only one."""
        self._world, self._memory, self._journal = world, world.memory, world.journal
        self._links, self._mesh = links, links.mesh
        self._job_dir, self._job_hash = job_dir, job_hash
        self._server, self._repair_sums, self._owner = server, repair_sums, owner
        self._has_one_slot = has_one_slot
        self._fetches: dict[int, Fetch] = {}  # by rank
        # own slots that stand still while their bytes are brought back
        self._mending: dict[int, Slot] = {}
        self._inventories: dict[int, Inventory] = {}  # by node
        self._stranded: dict[int, _Stranded] = {}  # by rank

    def end(self) -> None:
        """Another mesh begins."""
        for fetch in self._fetches.values():
            fetch.stop()
        for slot in self._mending.values():
            _release(slot)

    # -- what there is

    def receive_inventory(self, node: int, inventory: Inventory) -> None:
        """What that node has proven."""
        self._inventories[node] = inventory

    def silent_nodes(self) -> frozenset[int]:
        """Those that have not told yet."""
        nodes = (member.node for member in self._mesh.members)
        return frozenset(node for node in nodes if node not in self._inventories)

    def shares(self) -> dict[tuple[int, Stamp], Share]:
        """What snapshots that nodes hold for others tell of what these share."""
        return {
            (rank, stamp): share
            for inventory in self._inventories.values()
            for rank, stamp, share in inventory.shares
        }

    def restorable(self, proven: Mapping[int, frozenset[Stamp]]) -> dict[int, frozenset[Stamp]]:
        """The stamps that each rank can be given. `proven`: what ranks that have joined hold
        themselves."""
        return restorable_by_rank(range(self._mesh.world_size), self._believed(proven))

    def sources(
        self, wanted: list[int], stamp: Stamp, proven: Mapping[int, frozenset[Stamp]]
    ) -> dict[int, RestoreSource]:
        """Where these ranks fetch `stamp` from, by rank."""
        return restore_sources(wanted, stamp, self._believed(proven))

    def _believed(self, proven: Mapping[int, frozenset[Stamp]]) -> dict[int, Inventory]:
        believed = dict(self._inventories)
        for rank, stamps in proven.items():
            node = self._mesh.node_of[rank]
            if node in believed:
                old = believed[node]
                own = {HeldSnapshot(rank, stamp) for stamp in stamps}
                believed[node] = replace(old, snapshots=old.snapshots | own)
        return believed

    # -- bringing it

    def link_with_sources(self, sources: Mapping[int, RestoreSource]) -> None:
        """Everybody makes the links that restoring needs: the asking and the giving end. What was
        wanted before is wanted no more."""
        self._stranded.clear()
        for rank, source in sources.items():
            self.link(source, {self._mesh.node_of[rank]})

    def link(self, source: RestoreSource, askers: Collection[int], is_needed: bool = True) -> None:
        """This node's end of what these nodes need to fetch from there. `is_needed`: nobody can go
        on without it."""
        here, givers = self._links.node, givers_of(source)
        wanted = {*(givers if here in askers else ()), *(askers if here in givers else ())}
        if is_needed:
            self._links.link_with(wanted, to_restore=True)
            wanted = set()
        if here in givers and source.members:  # they add up each other's pieces where they can
            wanted |= givers
        for node in sorted(wanted - self._links.linked()):
            self._links.link_again(node)

    def is_stranded(self, rank: int) -> bool:
        """Whether it is wanted, and its sources could not be reached."""
        return rank in self._stranded

    def stop(self, rank: int) -> None:
        """Nobody waits for it any more."""
        self._stranded.pop(rank, None)
        known = self._fetches.pop(rank, None)
        if known is not None:
            known.stop()

    def fetch(
        self, source: RestoreSource, stamp: Stamp, then: Then, path: Path | None = None
    ) -> None:
        """Bring that rank's snapshot here, to `path`, or among the rank's slots. That a source
        cannot be reached is no reason to give it up: then another mesh will come, or the link be
        open again, and it is fetched anew."""
        rank = source.rank

        def ended(result: FetchResult) -> None:
            if self._fetches.get(rank) is fetch:
                del self._fetches[rank]
            self._record(result)
            if result.is_away and result.why is not None:
                self._stranded[rank] = _Stranded(source, stamp, then, path)
            else:
                then(result.why)

        self.stop(rank)
        fetch = self._new_fetch(source, stamp, ended, path)
        self._fetches[rank] = fetch
        fetch.start()

    def _new_fetch(
        self,
        source: RestoreSource,
        stamp: Stamp,
        ended: Callable[[FetchResult], None],
        path: Path | None = None,
    ) -> Fetch:
        return Fetch(
            self._world,
            self._links,
            self._server,
            self._repair_sums,
            self._job_dir,
            self._job_hash,
            source,
            stamp,
            ended,
            path,
            self._has_one_slot,
        )

    def _record(self, result: FetchResult) -> None:
        took = human_ns(result.took_ns)
        nodes = ", ".join(map(str, result.sources))
        several = "s" if len(result.sources) > 1 else ""
        told = (
            f"{result.stamp} of rank {result.rank}: {human_bytes(result.nbytes)} from "
            f"node{several} {nodes} in {took}"
        )
        if result.why is not None:
            told = f"{result.stamp} of rank {result.rank} cannot be had from memory: {result.why}"
        self._journal.record(
            "fetched" if result.why is None else "fetch-failed",
            told,
            rank=result.rank,
            step=result.stamp.step,
            nbytes=result.nbytes,
            sources=list(result.sources),
            took_ns=result.took_ns,
        )

    def mend(self, rank: int, index: int, stamp: Stamp, then: Then) -> None:
        """Bring a rank's own damaged snapshot back from its holders, in place."""
        source = self._owner.source_of(rank, stamp)
        if source is None or rank in self._fetches:
            then("no other node has proven a copy of it")
            return
        target = slot_path(self._job_dir, rank, index)
        try:
            slot = Slot(self._memory, target)
        except (DamageError, OSError) as error:
            then(f"it cannot be opened: {error}")
            return
        if not slot.lock(exclusive=False):
            slot.close()
            then("it is being overwritten")
            return
        self._mending[rank] = slot
        spare = target.with_name("mended")

        def ended(result: FetchResult) -> None:
            self._fetches.pop(rank, None)
            self._record(result)
            why = result.why
            if why is None:
                why = replace_bytes(self._memory, slot, spare)
                self._memory.remove(spare)
            _release(self._mending.pop(rank))
            then(why)

        fetch = self._new_fetch(source, stamp, ended, spare)
        self._fetches[rank] = fetch
        fetch.start()

    # -- what others say

    def unavailable(self, node: int, rank: int, stamp: Stamp, why: str) -> bool:
        """A node cannot give what was asked of it; False when nothing of that snapshot is being
        fetched."""
        waiting = [
            fetch
            for fetch in self._fetches.values()
            if fetch.stamp == stamp and rank in (fetch.source.rank, *fetch.source.stripe_group)
        ]
        for fetch in waiting:
            fetch.source_failed(node, why)
        return bool(waiting)

    def link_is_open(self, node: int) -> None:
        """What could not be had from there, perhaps now can."""
        again = [known for known in self._stranded.values() if node in givers_of(known.source)]
        for source, stamp, then, path in again:
            del self._stranded[source.rank]
            self.fetch(source, stamp, then, path)

    def link_is_dead(self, node: int, why: str) -> None:
        """Nothing comes from there any more."""
        for fetch in list(self._fetches.values()):
            fetch.link_is_dead(node, why)


def givers_of(source: RestoreSource) -> set[int]:
    """The nodes that it is fetched from."""
    return {*source.copies, *(member.node for member in source.members)}


def _release(slot: Slot) -> None:
    slot.unlock()
    slot.close()
