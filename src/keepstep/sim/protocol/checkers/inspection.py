"""Inspection: reads the memory of simulated machines from outside, with the formats' own code, and
leaves no trace of it.

Goes out: what is proven where, and which stamps all ranks could go back to at this instant, by
nothing but the bytes that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from keepstep.core.resume.cut import Holding, agree, holding_of
from keepstep.core.resume.sources import restorable_stamps
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.slot import Slot, ranks_in, slot_paths
from keepstep.edge.shm.status_page import StatusPage, status_path
from keepstep.edge.shm.whole import whole
from keepstep.errors import DamageError
from keepstep.model.restore_sources import HeldParity, HeldSnapshot, Inventory
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
    """Of one machine."""

    def __init__(self, machine: Machine, job_dir: Path) -> None:
        self._memory = SimMemory(machine.files, onlooker(machine))
        self._job_dir = job_dir

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
                    with whole(self._memory, slot) as all_of_it:
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
        (`core/redundancy/shares.py`), also where the bytes of each could be put together."""
        return not agree(stamp, self.holdings(world_size))

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
        whole = {
            HeldSnapshot(rank, header.stamp)
            for part in parts
            for rank, header, _, _ in self.proven(part)
        }
        coded = set()
        for rank, header, _, manifest in self.proven("parity"):
            stripes = contents_from(manifest, self._memory.block_bytes).stripes
            coded.add(HeldParity(rank, header.stamp, stripes.members, stripes.tolerates))
        return Inventory(frozenset(whole), frozenset(coded))


def restorable(
    job: SimJob, world_size: int, parts: Iterable[str] = ("", "held")
) -> frozenset[Stamp]:
    """The stamps that every rank has or can be given, from what lies on the machines that live."""
    job_dir = job.around.settings.job_dir
    inventories = {
        node.machine.number: Inspection(node.machine, job_dir).inventory(parts)
        for node in job.living_nodes()
    }
    reach = [restorable_stamps(rank, inventories) for rank in range(world_size)]
    return frozenset.intersection(*reach) if reach else frozenset()
