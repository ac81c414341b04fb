"""Lost steps: all go back to the newest generation that there was after the last thing that the
nemesis did, and never behind what is owed. Nobody begins afresh where the memory of a machine holds
this job's state of another world size.

Counts what was lost. Not verified: how far the newest generation lies behind the training (a slow
network makes that as large as it likes); resumptions in which something struck between the first
rank's question and the permission, beyond what is owed.
"""

from __future__ import annotations

from keepstep.edge.shm.slot_store import SHELVES
from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.checkers.inspection import Inspection, restorable
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.program import Program


class LostSteps(Checker):
    NAME = "lost steps"
    _epoch = 0
    _best: Stamp | None = None  # that all could go back to, when the nemesis had struck last
    _ranks = 0  # of which it was the best
    _trained_ranks = 0  # of the world that memory is of
    _struck_ns = -1
    _joined_ns = -1
    _completed = -1

    def __init__(self, job: SimJob, atlas: Atlas) -> None:
        super().__init__(job, atlas)
        # by machine: the size of another world whose state it holds, when a rank there asked last
        self._foreign: dict[int, int | None] = {}

    def struck(self, what: str) -> None:
        # what only the only slots hold may be overwritten before anybody asks
        parts = ("held",) if self.job.plan.slots == 1 else ("", "held")
        self._ranks = ranks = self.atlas.world_size
        nodes = [Inspection(self.job, node.machine) for node in self.job.living_nodes()]
        self._best = max(
            (
                stamp
                for stamp in restorable(self.job, ranks, parts)
                if not any(node.is_nobodys(stamp, ranks) for node in nodes)
            ),
            default=None,
        )
        self._struck_ns = self.job.world.now_ns

    def joined(self, program: Program) -> None:
        if self._joined_ns < 0:
            self._joined_ns = self.job.world.now_ns
        if self.job.plan.min_nodes:
            machine = program.process.machine
            inspection = Inspection(self.job, machine)
            headers = [
                h for part in ("", *SHELVES.values()) for _, h, _, _ in inspection.proven(part)
            ]
            foreign = {h.world_size for h in headers} - {program.who.world_size}
            self._foreign[machine.number] = max(foreign, default=None)

    def stepped(self, program: Program, step: int) -> None:
        self._completed = max(self._completed, step)

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        foreign = self._foreign.get(program.process.machine.number)
        if source == "fresh" and foreign is not None:
            self.violated(
                f"rank {program.who.rank} of {program.who.world_size} starts afresh, and its "
                f"machine holds state of {foreign} ranks"
            )
        # Epochs begin again when all memory is lost.
        begins_again = source != "memory" and self._joined_ns >= 0
        if epoch <= self._epoch and not begins_again:
            return
        self._epoch = epoch
        before, self._joined_ns = self._joined_ns, -1
        self.job.lost_steps += max(0, self._completed - stamp.step)
        self._completed = stamp.step
        if any("takes a machine's memory" in fault for fault in self.job.faults):
            return  # there may be no room for what others could give
        ranks = program.who.world_size
        trained_ranks, self._trained_ranks = self._trained_ranks, ranks
        owed = self.atlas.owed() if self.atlas.committed_ranks == ranks else None
        if owed is not None and _is_before(source, stamp, owed):
            self.violated(
                f"all go on from {stamp} ({source}), and {owed} of epoch {owed.epoch} is owed"
            )
        best, self._best = self._best, None
        atlas = self.atlas
        if (
            best is not None
            and self._ranks == ranks == trained_ranks
            and not atlas.is_over
            and not atlas.damages
            and self._struck_ns < before
            and _is_before(source, stamp, best)
        ):
            self.violated(
                f"all go on from {stamp} ({source}), and {best} of epoch {best.epoch} was "
                "within reach of all"
            )


def _is_before(source: str, stamp: Stamp, other: Stamp) -> bool:
    """Whether what all go on from is behind that. A checkpoint may be ahead of all that memory
    holds in common."""
    if source == "memory":
        return stamp < other
    return source == "fresh" or stamp.step < other.step
