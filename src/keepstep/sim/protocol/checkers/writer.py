"""One writing incarnation a rank: an epoch is one computation, begun once from one state, and each
of its steps is done once by each rank.

Not verified: what a process does whose machine nobody reaches, beyond that it completes no step;
locks of pages and slots (a second owner of a page on one machine is a violation where it is found,
in `trainer.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.trainer import Rank
from keepstep.sim.protocol.job.observer import Checker

if TYPE_CHECKING:
    from keepstep.sim.protocol.job.job import Job


class OneWriter(Checker):
    name = "one writer"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._began: dict[int, tuple[str, Stamp]] = {}
        self._where: dict[int, set[int]] = {}  # by epoch: the machines that it began on
        self._may: dict[int, tuple[Rank, int]] = {}  # by rank: who may train, in which epoch
        self._done: dict[tuple[int, int], int] = {}  # by rank and epoch: the newest step

    def went(self, rank: Rank, source: str, stamp: Stamp, epoch: int) -> None:
        known = self._began.get(epoch)
        if known is None or not any(self.job.sites[n].machine.alive for n in self._where[epoch]):
            # An epoch may come again when nothing is left of the machines that ever heard of it.
            self._began[epoch], self._where[epoch] = (source, stamp), set()
            self._done = {key: step for key, step in self._done.items() if key[1] != epoch}
        elif self.job.atlas.is_over:
            pass  # nor when all had done their last step, and keepers have removed what they had
        elif known != (source, stamp):
            self.violated(
                f"epoch {epoch} began at {known[1]} ({known[0]}), and rank {rank.rank} "
                f"begins it at {stamp} ({source})"
            )
        elif (rank.rank, epoch) in self._done:
            self.violated(f"rank {rank.rank} begins epoch {epoch} twice")
        self._where[epoch].add(rank.site.machine.number)
        self._done[(rank.rank, epoch)] = stamp.step
        self._may[rank.rank] = (rank, epoch)

    def stepped(self, rank: Rank, step: int) -> None:
        who, epoch = self._may[rank.rank]
        if who is not rank or epoch != rank.epoch:
            self.violated(
                f"rank {rank.rank} completes step {step} in epoch {rank.epoch}, and epoch "
                f"{epoch} has begun for it elsewhere"
            )
        if step <= self._done[(rank.rank, rank.epoch)] and not self.job.atlas.is_over:
            self.violated(f"rank {rank.rank} completes step {step} again in epoch {rank.epoch}")
        self._done[(rank.rank, rank.epoch)] = step
