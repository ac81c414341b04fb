"""Flaps: how often a link went down lately, and whether that is a cable about to go.

A flap takes seconds and is survived; two within five minutes, or more than five a day, are a cable
or an optic (ByteRobust, SOSP 2025; Azure's NHC).
"""

from __future__ import annotations

from collections import deque

from keepstep.model.units import S_NS

SOON_NS = 300 * S_NS
SOON_FLAPS = 2
DAY_NS = 24 * 3600 * S_NS
DAY_FLAPS = 5


class Flaps:
    """Of one link."""

    def __init__(self) -> None:
        self._seen_ns: deque[int] = deque(maxlen=4 * DAY_FLAPS)

    def note(self, count: int, at_ns: int) -> None:
        """It went down so often since the look before."""
        self._seen_ns.extend([at_ns] * min(max(0, count), 4 * DAY_FLAPS))

    def why(self, at_ns: int) -> str:
        """What is wrong; empty: it is steady enough."""
        soon = sum(at_ns - flap <= SOON_NS for flap in self._seen_ns)
        if soon >= SOON_FLAPS:
            return f"its link went down {soon} times within five minutes"
        today = sum(at_ns - flap <= DAY_NS for flap in self._seen_ns)
        if today > DAY_FLAPS:
            return f"its link went down {today} times within a day"
        return ""
