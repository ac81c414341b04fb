"""A moment, by both clocks: what a view is as of."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.edge.os.clock import CLOCK


@dataclass(frozen=True, slots=True)
class Moment:
    """The two clocks, read at once: `wall_ns` since 1970, `mono_ns` since some start of its own, in
    this `boot` of the machine."""

    wall_ns: int
    mono_ns: int
    boot: str = ""

    @classmethod
    def now(cls) -> Moment:
        """This moment."""
        return cls(CLOCK.wall_ns(), CLOCK.monotonic_ns(), CLOCK.boot())
