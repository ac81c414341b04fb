"""A halt ends alike: where a step is taken back because its numbers are in doubt, every rank takes
it back; none goes on from it, whoever leads, and whatever is said late or twice.

Not verified: ranks that know that a peer is lost, which vote in any case; and halts of which
nothing comes, which one rank may take for void while another has heard that all agree.
"""

from __future__ import annotations

from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.program import Program

Place = tuple[int, int]  # an epoch, and a step of it


class AHaltEndsAlike(Checker):
    NAME = "a halt ends alike"

    def __init__(self, job: SimJob, atlas: Atlas) -> None:
        super().__init__(job, atlas)
        self._taken_back: dict[Place, int] = {}  # and by which rank first
        self._counted: dict[Place, int] = {}

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        if source != "memory":  # epochs begin again when all memory is lost
            self._taken_back.clear()
            self._counted.clear()

    def halted(self, program: Program, step: int, is_taken_back: bool | None) -> None:
        place = self._place(program, step)
        if is_taken_back:
            self._taken_back.setdefault(place, program.who.rank)
            self._compare(place)

    def stepped(self, program: Program, step: int) -> None:
        rank = program.rank
        if rank is not None and not rank.has_lost_peer:
            place = self._place(program, step)
            self._counted.setdefault(place, program.who.rank)
            self._compare(place)

    def _place(self, program: Program, step: int) -> Place:
        return (program.rank.epoch if program.rank is not None else -1), step

    def _compare(self, place: Place) -> None:
        back, on = self._taken_back.get(place), self._counted.get(place)
        if back is not None and on is not None:
            self.violated(
                f"rank {back} takes step {place[1]} of epoch {place[0]} back, and rank {on} goes "
                "on from it"
            )
