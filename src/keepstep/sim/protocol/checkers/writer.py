"""One writing incarnation a rank: an epoch is one computation, begun once from one state, and each
of its steps is done once by each rank.

Not verified: what a process does whose machine nobody reaches, beyond that it completes no step;
locks of pages and slots.
"""

from __future__ import annotations

from keepstep.model.events import Event
from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.world.machine import Machine


class OneWriter(Checker):
    NAME = "one writer"

    def __init__(self, job: SimJob, atlas: Atlas) -> None:
        super().__init__(job, atlas)
        self._began: dict[int, tuple[str, Stamp]] = {}
        self._where: dict[int, set[int]] = {}  # by epoch: the machines that it began on
        # by rank: the process that may train, in which epoch
        self._may: dict[int, tuple[Program, int]] = {}
        self._done: dict[tuple[int, int], int] = {}  # by rank and epoch: the newest step

    def recorded(self, machine: Machine, event: Event) -> None:
        if event.kind == "keeper-ended":  # nothing is left there of any epoch
            for where in self._where.values():
                where.discard(machine.number)

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        rank = program.who.rank
        known = self._began.get(epoch)
        if known is None or not any(self.job.nodes[n].machine.alive for n in self._where[epoch]):
            # An epoch may come again when nothing is left where anybody ever heard of it.
            self._began[epoch] = (source, stamp)
            self._where[epoch] = set()
            self._done = {key: step for key, step in self._done.items() if key[1] != epoch}
        elif self.atlas.is_over:
            pass  # nor when all had done their last step, and keepers have removed what they had
        elif known != (source, stamp):
            self.violated(
                f"epoch {epoch} began at {known[1]} ({known[0]}), and rank {rank} begins it at "
                f"{stamp} ({source})"
            )
        elif (rank, epoch) in self._done:
            self.violated(f"rank {rank} begins epoch {epoch} twice")
        self._where[epoch].add(program.process.machine.number)
        self._done[rank, epoch] = stamp.step
        now, newest = self._may.get(rank, (None, -1))
        # Who was stopped, and goes on in an epoch that is over elsewhere, may begin: it completes
        # no step.
        if now is None or not now.process.alive or epoch >= newest:
            self._may[rank] = (program, epoch)

    def stepped(self, program: Program, step: int) -> None:
        assert program.rank is not None
        rank = program.who.rank
        own_epoch = program.rank.epoch
        who, epoch = self._may[rank]
        if who is not program or epoch != own_epoch:
            self.violated(
                f"rank {rank} completes step {step} in epoch {own_epoch}, and epoch {epoch} has "
                "begun for it elsewhere"
            )
        if step <= self._done[rank, own_epoch] and not self.atlas.is_over:
            self.violated(f"rank {rank} completes step {step} again in epoch {own_epoch}")
        self._done[rank, own_epoch] = step
