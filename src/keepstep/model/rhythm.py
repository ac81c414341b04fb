"""Rhythm: what a trainer's collectives do to its network, as it is seen while the steps run. Times are CLOCK_MONOTONIC nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

NO_STEP = -1


@dataclass(frozen=True, slots=True)
class Pulse:
    """A rank's network now. `entered`: collectives of this step that were begun; `pending` of them have not ended; so since `since_ns`."""

    step: int
    entered: int
    pending: int
    since_ns: int

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
    """What a keeper has measured of its link and decided. `open_because`: why it does not interleave; empty when it does."""

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
