"""A moment, by both clocks: what a view is as of."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """The two clocks, read at once: `wall_ns` since 1970, `mono_ns` since some start of its own."""

    wall_ns: int
    mono_ns: int

    @classmethod
    def now(cls) -> Moment:
        """This moment."""
        return cls(time.time_ns(), time.monotonic_ns())
