"""Clocks: the wall clock and the monotonic one, read as close to each other as can be.

Canary: the monotonic clock does not go back between two looks at it.
"""

from __future__ import annotations

import time

from keepstep.edge.doctor.host import Host
from keepstep.edge.parts.probe import PartLook, Targets
from keepstep.model.parts import ClockReading

TRIES = 5


def probe_clock(host: Host, targets: Targets, cursor: int) -> PartLook:
    """See `Probe`."""
    found = []
    for _ in range(TRIES):
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        after_ns = time.monotonic_ns()
        found.append(ClockReading(wall_ns, (before_ns + after_ns) // 2, after_ns - before_ns))
    if any(each.spread_ns < 0 for each in found) or found[-1].mono_ns <= cursor:
        return PartLook(blind="the monotonic clock went back")
    best = min(found, key=lambda each: each.spread_ns)
    return PartLook((best,), cursor=found[-1].mono_ns)
