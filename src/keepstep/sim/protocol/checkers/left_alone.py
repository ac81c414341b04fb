"""Who trains is left alone: ranks are not called late, and restarted, when all of them have trained
since the way back began in which they were to find together.

Not verified: ranks that are restarted for another reason than that they are late.
"""

from __future__ import annotations

from keepstep.model.events import Event
from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.world.machine import Machine

LATE = ("did not find its peers again", "does not look for its peers any more")
WAYS_BACK = ("plan", "anew", "ranks-restarted")


class WhoTrainsIsLeftAlone(Checker):
    NAME = "who trains is left alone"

    def __init__(self, job: SimJob, atlas: Atlas) -> None:
        super().__init__(job, atlas)
        self._trained: set[int] = set()  # ranks, since a way back began

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        self._trained.discard(program.who.rank)

    def stepped(self, program: Program, step: int) -> None:
        self._trained.add(program.who.rank)

    def recorded(self, machine: Machine, event: Event) -> None:
        if event.kind not in WAYS_BACK:
            return
        is_late = any(words in event.why for words in LATE)
        if is_late and len(self._trained) == self.atlas.world_size:
            self.violated(f"all ranks train, and all are restarted: {event.why}")
        self._trained.clear()
