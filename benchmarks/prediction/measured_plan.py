"""Measured plan: the plan of a simulated job in which everything takes as long as it took in a real
one.

Comes in: a `Pace`. Goes out: how long each thing takes, drawn from what was measured of it, with
equal chance; what was not measured takes as long as the plan itself has it. Decides nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from benchmarks.prediction.pace import Aftermath, Pace
from keepstep.model.snapshot import Phase
from keepstep.sim.protocol.job.plan import RunPlan


@dataclass
class Course:
    """What one run has come to. `aftermath`: of the newest strike. `lives`: processes of ranks that
    there have been."""

    aftermath: Aftermath = field(default_factory=Aftermath)
    lives: int = 0


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan(RunPlan):
    """`load_ns`: how long a rank takes to load a snapshot. `course`: of the one run that this plan
    is for; whoever strikes tells it of the aftermath."""

    pace: Pace
    load_ns: int
    course: Course = field(default_factory=Course)

    def new_tempo(self, rank: int, random: Random) -> MeasuredTempo:
        self.course.lives += 1
        # Each life of a rank has its own chance, as each has had its own durations.
        own = Random(f"{random.random()}/{self.course.lives}")
        return MeasuredTempo(self.pace, self.load_ns, own)

    def takes_ns(self, what: str, random: Random) -> int:
        """As long as it took after this failure, else after any."""
        measured = getattr(self.course.aftermath, what, ()) or getattr(self.pace.failures, what, ())
        return random.choice(measured) if measured else super().takes_ns(what, random)


class MeasuredTempo:
    """One life of a rank's. See `Tempo`.

    At a step's end the program waits `stall_ns`; so long after that, or before, its capture begins,
    which is announced. From there it takes `copy_ns` to the seal, which is announced, too, and
    `seal_ns` to its end.
    """

    def __init__(self, pace: Pace, load_ns: int, random: Random) -> None:
        self._pace = pace
        self._load_ns = load_ns
        self._random = random
        self._stall_ns = 0
        self._next_trainer_ns = 0
        self._next_background_ns = 0

    def before_collective_ns(self) -> int:
        return self._random.choice(self._pace.forward_ns)

    def collective_ns(self) -> int:
        return self._random.choice(self._pace.collective_ns)

    def before_update_ns(self) -> int:
        return self._random.choice(self._pace.rest_ns)

    def after_update_ns(self) -> int:
        return self._random.choice(self._pace.update_ns)

    def body_over(self) -> None:
        self._stall_ns = self._random.choice(self._pace.stall_ns)
        capture_ns = self._random.choice(self._pace.capture_ns)
        self._next_background_ns = max(0, self._stall_ns + capture_ns)

    def boundary_ns(self) -> int:
        return self._stall_ns

    def announced(self, phase: Phase) -> None:
        match phase:
            case Phase.CAPTURE:
                self._next_background_ns = self._random.choice(self._pace.copy_ns)
            case Phase.SEAL:
                self._next_background_ns = self._random.choice(self._pace.seal_ns)
            case Phase.RESTORE:
                self._next_trainer_ns = self._load_ns

    def trainer_act_ns(self) -> int:
        next_ns, self._next_trainer_ns = self._next_trainer_ns, 0
        return next_ns

    def background_act_ns(self) -> int:
        next_ns, self._next_background_ns = self._next_background_ns, 0
        return next_ns
