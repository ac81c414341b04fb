"""Link speed: what a chunk costs on a link, from how its socket's queue drained.

Comes in: so many bytes were acknowledged within so long, or at least so many. Goes out: a `Cost`. Measures nothing.

Whatever disturbs a sample (other traffic, a process that is not woken in time, an acknowledgement that is held back) makes it smaller: so
the link's speed is the upper quartile of the last ones.
"""

from __future__ import annotations

from collections import deque

from keepstep.core.interleave import Cost
from keepstep.model.units import MS_NS, S_NS

SAMPLES = 16
QUARTILE = 3 / 4
LEAST_SAMPLE_NS = MS_NS
FIRST_BYTES_PER_S = 12_500_000  # until something is known: 100 Mbit/s


class LinkSpeed:
    def __init__(self) -> None:
        self._rates: deque[int] = deque(maxlen=SAMPLES)
        self._nbytes = self._took_ns = 0

    @property
    def is_known(self) -> bool:
        return bool(self._rates)

    @property
    def bytes_per_s(self) -> int:
        return sorted(self._rates)[int(QUARTILE * len(self._rates))] if self._rates else FIRST_BYTES_PER_S

    def drained(self, nbytes: int, took_ns: int, emptied: bool) -> None:
        """`emptied`: the queue was empty at the end, so it may have taken less: then it counts only where it tells of a faster link."""
        if not emptied:
            self._nbytes, self._took_ns = self._nbytes + nbytes, self._took_ns + took_ns
            if self._took_ns >= LEAST_SAMPLE_NS:
                self._add(self._nbytes, self._took_ns)
                self._nbytes = self._took_ns = 0
        elif nbytes * S_NS > self.bytes_per_s * max(1, took_ns) and took_ns >= LEAST_SAMPLE_NS // 2:
            self._add(nbytes, took_ns)

    def _add(self, nbytes: int, took_ns: int) -> None:
        if nbytes > 0 and took_ns > 0:
            self._rates.append(max(1, nbytes * S_NS // took_ns))

    def cost(self, round_trip_ns: int) -> Cost:
        return Cost(round_trip_ns, self.bytes_per_s)
