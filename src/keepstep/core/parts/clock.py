"""Clock: whether the wall clock was set, or runs at another speed than the monotonic one.

Comes in: both clocks, at one moment. Goes out: the health of `clock`. Nothing of keepstep's goes by
the wall clock; but logs, certificates, leases of other services and whoever puts several machines'
events in order do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from keepstep.core.parts.judge import sick, well
from keepstep.model.parts import ClockReading, PartHealth, PartPolicy, PartReading
from keepstep.model.units import S_NS

STEP_NS = S_NS // 2
TOLD_NS = 300 * S_NS  # so long a step counts
DRIFT_PER_S_NS = 1_000_000  # 1000 ppm: twice what NTP slews
DRIFT_OVER_NS = 600 * S_NS
FIX = "look at chronyd or ntpd (timedatectl)"


class ClockJudge:
    """See `Judge`."""

    def __init__(self) -> None:
        self._looks: deque[tuple[int, int]] = deque()  # monotonic, and how far ahead the wall is
        self._stepped: tuple[int, int] | None = None  # when, by how much

    def add(self, readings: Sequence[PartReading], at_ns: int) -> list[PartHealth]:
        """See `Judge`."""
        for each in readings:
            if isinstance(each, ClockReading):
                return [self._judge(each, at_ns)]
        return []

    def _judge(self, reading: ClockReading, at_ns: int) -> PartHealth:
        ahead_ns, mono_ns = reading.wall_ns - reading.mono_ns, reading.mono_ns
        if self._looks:
            by_ns = ahead_ns - self._looks[-1][1]
            if abs(by_ns) > STEP_NS + reading.spread_ns:
                self._stepped = (mono_ns, by_ns)
                self._looks.clear()
        self._looks.append((mono_ns, ahead_ns))
        while mono_ns - self._looks[0][0] > DRIFT_OVER_NS:
            self._looks.popleft()
        if self._stepped is not None and mono_ns - self._stepped[0] < TOLD_NS:
            why = f"somebody has set the wall clock by {self._stepped[1] / S_NS:+.1f} s"
            return sick("clock", at_ns, why, FIX, PartPolicy.WARN)
        over_ns = mono_ns - self._looks[0][0]
        drift_ns = ahead_ns - self._looks[0][1]
        if over_ns > DRIFT_OVER_NS // 2 and abs(drift_ns) * S_NS > DRIFT_PER_S_NS * over_ns:
            why = f"the wall clock gains {drift_ns / over_ns * 1e6:+.0f} us a second"
            return sick("clock", at_ns, why, FIX, PartPolicy.WARN)
        return well("clock", at_ns)
