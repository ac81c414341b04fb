"""What was given up never comes back: when all go on from a state, every newer one of the epochs
before is void, wherever it lies, and nobody ever goes on from it again.

Not verified: epochs that come again, because nothing is left of the machines that ever heard of
them.
"""

from __future__ import annotations

from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.program import Program


class GivenUp(Checker):
    NAME = "given up"

    def __init__(self, job: SimJob, atlas: Atlas) -> None:
        super().__init__(job, atlas)
        self._newest: dict[int, Stamp] = {}  # by epoch: the newest of it that counts since
        self._began: set[int] = set()

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        if source == "memory" and not self.atlas.is_over:
            newest = self._newest.get(stamp.epoch)
            if newest is not None and stamp > newest:
                self.violated(
                    f"all go on from {stamp} of epoch {stamp.epoch}, which was given up when they "
                    f"went on from {newest} of epoch {newest.epoch}"
                )
        floor = stamp if source == "memory" else Stamp(-1, 0)
        self._newest.pop(epoch, None)
        for older in self._began:
            if older < epoch:
                self._newest[older] = min(floor, self._newest.get(older, floor))
        self._began.add(epoch)
