"""Inspection: reads the memory of simulated machines from outside, with the formats' own code, and
leaves no trace of it.

Goes out: what is proven where, and which stamps all ranks could go back to at this instant, by
nothing but the bytes that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path

from keepstep.core.resume.cut import Holding, agree, holding_of, is_complete
from keepstep.core.resume.sources import restorable_stamps
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.slot import Slot, ranks_in, slot_paths
from keepstep.edge.shm.slot_header import parse_page
from keepstep.edge.shm.status_page import StatusPage, status_path
from keepstep.edge.shm.whole import whole
from keepstep.errors import DamageError
from keepstep.model.restore_sources import HeldParity, HeldShare, HeldSnapshot, Inventory
from keepstep.model.shares import Share
from keepstep.model.snapshot import RankStatus, SlotHeader, SlotState, Stamp
from keepstep.model.wire import Part
from keepstep.runtime.replication.encode import contents_from
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.memory import SimMemory
from keepstep.sim.protocol.world.world import Process


class _Unseen(Process):
    """Whose calls count for nothing."""

    def touch(self, *what: str) -> bool:
        return False


def onlooker(machine: Machine) -> Process:
    """Who looks at that machine, or at what it shares with others, from outside."""
    return _Unseen(machine.world, machine, "onlooker", 0)


class Inspection:
    """Of one machine. Where ranks share over nodes, a snapshot is what its rank keeps of it: the
    other parts are other ranks' snapshots, on other machines."""

    def __init__(self, job: SimJob, machine: Machine) -> None:
        settings = job.around.settings
        self._memory = SimMemory(machine.files, onlooker(machine))
        self._job_dir = settings.job_dir
        self._is_over_nodes = settings.share_replicas == "job"

    def proven(
        self, part: str = "", only: int | None = None
    ) -> list[tuple[int, SlotHeader, bytes, bytes]]:
        """(rank, header, payload, manifest) of every sealed snapshot that proves: the ranks' own,
        or in `held` or `parity`; of all ranks, or of one."""
        root = self._job_dir / part if part else self._job_dir
        found = []
        for rank in ranks_in(self._memory, root) if only is None else [only]:
            for slot in self._slots(slot_paths(self._memory, root, rank)):
                with suppress(DamageError, LookupError):
                    of_it = nullcontext(slot) if self._is_over_nodes else whole(self._memory, slot)
                    with of_it as all_of_it:
                        header, manifest = all_of_it.verify_bytes()
                        payload = bytes(all_of_it.payload[: header.payload_bytes])
                    found.append((rank, header, payload, manifest))
        return found

    def copies(self, rank: int, stamp: Stamp) -> list[list[tuple[int, bytes]]]:
        """Of each copy of it that proves, the blocks that are in it, and where they lie."""
        found = []
        for slot in self._slots(slot_paths(self._memory, self._job_dir / "held", rank)):
            with suppress(DamageError, LookupError):
                header, _ = slot.verify_bytes()
                if header.stamp == stamp:
                    payload, size = slot.part(Part.PAYLOAD, header), header.block_bytes
                    kept = [b for b in range(header.block_count) if b not in slot.lacking()]
                    data = [(b * size, bytes(payload[b * size : (b + 1) * size])) for b in kept]
                    found.append(data)
        return found

    def newest_begun(self, rank: int) -> Stamp | None:
        """Of the copies of a rank, and of all parities, that are being written."""
        parity = self._job_dir / "parity"
        paths = slot_paths(self._memory, self._job_dir / "held", rank)
        for mine in ranks_in(self._memory, parity):
            paths += slot_paths(self._memory, parity, mine)
        begun = []
        for slot in self._slots(paths):
            with suppress(DamageError):
                header = slot.header()
                if header.state is SlotState.WRITING:
                    begun.append(header.stamp)
        return max(begun, default=None)

    def statuses(self, world_size: int) -> list[RankStatus]:
        """The pages of its ranks; those that can be read."""
        found = []
        for rank in range(world_size):
            with suppress(OSError, ValueError):
                page = StatusPage(self._memory, status_path(self._job_dir, rank))
                with closing(page):
                    status = page.read()
                if status is not None:
                    found.append(status)
        return found

    def holdings(self, world_size: int) -> list[Holding]:
        """What those pages tell of snapshots."""
        return [holding_of(status) for status in self.statuses(world_size)]

    def is_nobodys(self, stamp: Stamp, world_size: int) -> bool:
        """Replicas share it and differ at it, as their pages tell: it counts for nobody
        (`core/redundancy/shares.py`), also where the bytes of each could be put together. Over
        nodes one machine's pages do not tell: `restorable` looks at all machines' snapshots."""
        return not self._is_over_nodes and not agree(stamp, self.holdings(world_size))

    def committed(self) -> Stamp | None:
        """What the node's ranks read of it on its horizon page."""
        with suppress(OSError, ValueError):
            page = HorizonPage(self._memory, self._job_dir, make=False)
            with closing(page):
                return page.last().committed
        return None

    def _slots(self, paths: Iterable[Path]) -> Iterator[Slot]:
        """Those that can be opened, each open for its turn."""
        for path in paths:
            with suppress(DamageError, OSError), closing(Slot(self._memory, path)) as slot:
                yield slot

    def inventory(self, parts: Iterable[str] = ("", "held")) -> Inventory:
        """What the machine could tell the others if it were asked now. `parts`: where whole
        snapshots count."""
        own = [(rank, header) for part in parts for rank, header, _, _ in self.proven(part)]
        whole = {HeldSnapshot(rank, header.stamp) for rank, header in own}
        coded = set()
        for rank, header, payload, manifest in self.proven("parity"):
            contents = contents_from(manifest, self._memory.block_bytes)
            stripes = contents.stripes
            coded.add(HeldParity(rank, header.stamp, stripes.members, stripes.tolerates))
            for other in contents.metas:
                at, nbytes = contents.where(other, Part.HEADER)
                own.append((other, parse_page(payload[at : at + nbytes], self._job_dir)))
        shares = {HeldShare(rank, h.stamp, h.share) for rank, h in own if h.share is not None}
        return Inventory(frozenset(whole), frozenset(coded), frozenset(shares))


def restorable(
    job: SimJob, world_size: int, parts: Iterable[str] = ("", "held")
) -> frozenset[Stamp]:
    """The stamps that every rank has or can be given, from what lies on the machines that live."""
    inventories = {
        node.machine.number: Inspection(job, node.machine).inventory(parts)
        for node in job.living_nodes()
    }
    reach = [restorable_stamps(rank, inventories) for rank in range(world_size)]
    found = frozenset.intersection(*reach) if reach else frozenset()
    if job.around.settings.share_replicas != "job":
        return found
    told: dict[Stamp, dict[int, Share]] = {}
    for inventory in inventories.values():
        for rank, stamp, share in inventory.shares:
            told.setdefault(stamp, {})[rank] = share
    return frozenset(stamp for stamp in found if is_complete([*told.get(stamp, {}).values()]))
