"""Pressure: whether processes wait for memory, or for processor time that they are not given.

Comes in: what the kernel has counted by each look. Goes out: the health of `memory` and of `cpu`.
The kernel's counts say what was lost, not what was used: a full memory in which nobody waits is
well.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.parts.judge import Spell, sick, unseen, well
from keepstep.model.parts import PartHealth, PartPolicy, PartReading, PressureReading

STALL_RATIO = 0.1
LEAST_AVAILABLE_RATIO = 0.02
THROTTLED_RATIO = 0.25
LEAST_PERIODS = 20


class Pressure:
    """See `Judge`."""

    def __init__(self) -> None:
        self._last: tuple[int, PressureReading] | None = None
        self._stalls, self._is_short = Spell(), Spell()
        self._throttles, self._is_hot = Spell(), Spell()

    def add(self, readings: Sequence[PartReading], at_ns: int) -> list[PartHealth]:
        """See `Judge`."""
        found = [each for each in readings if isinstance(each, PressureReading)]
        if not found:
            return []
        before, self._last = self._last, (at_ns, found[0])
        if before is None or at_ns <= before[0]:
            return []
        took_ns = at_ns - before[0]
        return [
            self._memory(before[1], found[0], took_ns, at_ns),
            self._cpu(before[1], found[0], at_ns),
        ]

    def _memory(
        self, before: PressureReading, now: PressureReading, took_ns: int, at_ns: int
    ) -> PartHealth:
        stall_ns = _grown(before.stall_ns, now.stall_ns)
        left = now.available_ratio
        if stall_ns is None and left is None:
            return unseen("memory", at_ns, "the kernel counts no pressure (PSI)")
        ratio = (stall_ns or 0) / took_ns
        is_short = self._is_short.look(left is not None and left < LEAST_AVAILABLE_RATIO)
        if self._stalls.look(ratio >= STALL_RATIO):
            how_long = f" in {ratio:.0%} of the time" if ratio else " a little while ago"
            why = f"some process waited for memory{how_long}"
            return sick("memory", at_ns, why, "give the node memory, or lower what runs there")
        if is_short:
            why = (
                "too little memory was left"
                if left is None
                else f"{left:.1%} of the memory is left"
            )
            fix = "the kernel is about to kill: lower data workers or batch"
            return sick("memory", at_ns, why, fix, PartPolicy.WARN)
        return well("memory", at_ns)

    def _cpu(self, before: PressureReading, now: PressureReading, at_ns: int) -> PartHealth:
        periods = _grown(before.periods, now.periods)
        throttled = _grown(before.throttled, now.throttled)
        heat = _grown(before.heat, now.heat)
        if periods is None and heat is None:
            return unseen("cpu", at_ns, "the kernel counts neither a quota's periods nor heat")
        enough = periods is not None and periods >= LEAST_PERIODS
        ratio = (throttled or 0) / periods if enough and periods else 0.0
        is_hot = self._is_hot.look(bool(heat))
        if self._throttles.look(ratio >= THROTTLED_RATIO):
            now_and_then = f" in {ratio:.0%} of its periods" if ratio else " a little while ago"
            why = f"its quota ran out{now_and_then}"
            return sick("cpu", at_ns, why, "raise the cgroup's quota", PartPolicy.WARN)
        if is_hot:
            how_often = f"{heat} times since the last look" if heat else "a little while ago"
            why = f"cores were slowed down for their heat {how_often}"
            return sick("cpu", at_ns, why, "look at fans and airflow", slows=True)
        return well("cpu", at_ns)


def _grown(before: int | None, now: int | None) -> int | None:
    """By how much; None where nobody counts. A count that fell was made anew."""
    return None if before is None or now is None else max(0, now - before)
