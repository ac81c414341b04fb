"""Rhythm: what a trainer's collectives do to its network, as it is seen while the steps run. Times
are CLOCK_MONOTONIC nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

NO_STEP = -1


@dataclass(frozen=True, slots=True)
class Pulse:
    """A rank's network now. `entered`: collectives of this step that were begun; `pending` of them
    have not ended; so since `since_ns`, and maybe for `doubt_ns` longer."""

    step: int
    entered: int
    pending: int
    since_ns: int
    doubt_ns: int = 0

    @property
    def trains(self) -> bool:
        return self.step != NO_STEP


@dataclass(frozen=True, slots=True)
class Gap:
    """No collective was under way. `index`: so many of the step had been begun before."""

    index: int
    began_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class Told:
    """What a keeper has measured of its link and decided. `open_because`: why it does not
    interleave; empty when it does."""

    open_because: str
    mu: float
    alpha_ns: int
    bytes_per_s: int
    reserve_bytes: int
    chunk_bytes: int
    least_bytes: int
    step_bytes: int
    late: int


@dataclass(frozen=True, slots=True)
class Interleaved:
    """What a keeper's gate has done since the keeper began.

    `idle_ns`, `used_ns`, `overflow_ns`: of a step, by the latest of its `plans`: idle time that is
    counted on, what of it copies take, what they take beyond. `idle_bytes` went in idle spans,
    `late_bytes` whatever the rhythm said, because they had waited for long, `free_bytes` while
    nobody trained or nothing was held back.
    """

    plans: int
    idle_ns: int
    used_ns: int
    overflow_ns: int
    idle_bytes: int
    late_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class StepSeen:
    """One step of one rank, from boundary to boundary."""

    step: int
    began_ns: int
    ended_ns: int
    collectives: int
    gaps: tuple[Gap, ...]

    @property
    def step_ns(self) -> int:
        return self.ended_ns - self.began_ns

    @property
    def idle_ns(self) -> int:
        return sum(gap.ended_ns - gap.began_ns for gap in self.gaps)
