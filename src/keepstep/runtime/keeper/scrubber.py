"""Scrubbing: everything that rests on this node is verified again from time to time, and what fails
is mended, or given up.

Comes in: the clock, what the workers found. Goes out: damaged slots of ranks mended from other
nodes' memory, or their ranks told; damaged copies and parities given up, so that they come anew;
the word that all is well, upon which holders are asked to compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from keepstep.config import Settings
from keepstep.edge.shm.slot import Slot, ranks_in, slot_paths
from keepstep.errors import DamageError
from keepstep.model.messages.keeper_rank import SlotDamaged, ToRank
from keepstep.model.snapshot import RankStatus, SlotState
from keepstep.model.units import S_NS
from keepstep.ports import Memory
from keepstep.runtime.replication.node import Node
from keepstep.runtime.world import World


class Host(Protocol):
    """What the keeper does for it."""

    node: Node | None

    def status(self, rank: int) -> RankStatus | None: ...

    def tell(self, rank: int, message: ToRank) -> None: ...


@dataclass(frozen=True, slots=True)
class Finding:
    """A slot that does not prove. `rank` is None for what is held for other nodes."""

    path: Path
    rank: int | None
    index: int
    why: str


class Scrubbing:
    def __init__(self, settings: Settings, world: World, host: Host) -> None:
        self._job_dir, self._every_ns = settings.job_dir, round(settings.scrub_every_s * S_NS)
        self._world, self._host = world, host
        self._is_on = False
        self._began_ns = world.clock.monotonic_ns()

    def tick(self) -> None:
        """Begin when it is time, unless the last one is not done."""
        now_ns = self._world.clock.monotonic_ns()
        if self._every_ns and not self._is_on and now_ns - self._began_ns >= self._every_ns:
            self._is_on, self._began_ns = True, now_ns
            self._world.workers.submit(
                lambda: scrub(self._world.memory, self._job_dir), self._found
            )

    def soon(self) -> None:
        """Something that lies here does not prove."""
        self._began_ns = min(self._began_ns, self._world.clock.monotonic_ns() - self._every_ns)

    def _found(self, findings: list[Finding]) -> None:
        self._is_on = False
        node = self._host.node
        for finding in findings:
            if finding.rank is None:
                if node is not None:
                    node.damaged_at_rest(finding.path, finding.why)
                continue
            self._world.journal.record(
                "damaged", f"scrub: {finding.why}", rank=finding.rank, slot=finding.index
            )
            self._mend(finding.rank, finding.index, finding.why)
        if not findings and node is not None:
            node.compare()

    def _mend(self, rank: int, index: int, why: str) -> None:
        def give_up(_: str) -> None:
            self._host.tell(rank, SlotDamaged(index, why))

        def mended(failed: str | None) -> None:
            if failed is None:
                told = f"slot {index} of rank {rank} is whole again, from other nodes' memory"
                self._world.journal.record("mended", told, rank=rank, slot=index)
            else:
                give_up(failed)

        node, status = self._host.node, self._host.status(rank)
        # What the slot held is asked of the rank's page: its header may be what is damaged.
        if (
            node is None
            or status is None
            or index >= len(status.slots)
            or status.slots[index].state is not SlotState.SEALED
        ):
            give_up(why)
        else:
            node.restoring.mend(rank, index, status.slots[index].stamp, mended)


def scrub(memory: Memory, job_dir: Path) -> list[Finding]:
    """Re-verify every sealed slot: the ranks' own, copies and parities."""
    found = []
    for root in (job_dir, job_dir / "held", job_dir / "parity"):
        for rank in ranks_in(memory, root):
            for path in slot_paths(memory, root, rank):
                try:
                    slot = Slot(memory, path)
                    try:
                        slot.verify_bytes()
                    finally:
                        slot.close()
                except DamageError as error:
                    found.append(
                        Finding(
                            path,
                            rank if root == job_dir else None,
                            int(path.name.split("-")[1]),
                            str(error),
                        )
                    )
                except (LookupError, OSError):
                    continue
    return found
