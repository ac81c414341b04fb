"""Bandwidth: what a chunk costs on a link, from how its socket's queue drained.

Comes in: so many bytes were acknowledged within so long, or at least so many. Goes out: a `Cost`.
Measures nothing.

Acknowledgements come in clumps, because they queue behind what goes the other way: so a sample ends
where one has just come. What disturbs it (other traffic, a process that is not woken in time, an
acknowledgement that is held back) makes it smaller, and now and then what a shaper lets through at
once makes it larger: so a sample takes long, and of the last ones that counts which a third exceed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from keepstep.core.pacing.schedule import Cost
from keepstep.model.units import MS_NS, S_NS

SAMPLES = 31
RANK = 2 / 3
SAMPLE_NS = 10 * MS_NS
FIRST_BYTES_PER_S = 12_500_000  # until something is known: 100 Mbit/s


@dataclass
class _Sum:
    nbytes: int = 0
    took_ns: int = 0

    def add(self, nbytes: int, took_ns: int) -> int | None:
        """Bytes a second, when that is another sample."""
        self.nbytes, self.took_ns = self.nbytes + max(0, nbytes), self.took_ns + took_ns
        if self.took_ns < SAMPLE_NS or nbytes <= 0:
            return None
        rate = self.nbytes * S_NS // self.took_ns
        self.nbytes = self.took_ns = 0
        return rate or None


class LinkSpeed:
    def __init__(self) -> None:
        self._rates: deque[int] = deque(maxlen=SAMPLES)
        self._steady, self._least = _Sum(), _Sum()

    @property
    def is_known(self) -> bool:
        return bool(self._rates)

    @property
    def bytes_per_s(self) -> int:
        return (
            sorted(self._rates)[int(RANK * len(self._rates))] if self._rates else FIRST_BYTES_PER_S
        )

    def drained(self, nbytes: int, took_ns: int, emptied: bool) -> None:
        """`emptied`: the queue was empty at the end, so it may have taken less: then it counts
        where it tells of a faster link, or where nothing else is known."""
        rate = (self._least if emptied else self._steady).add(nbytes, took_ns)
        if rate is not None and (not emptied or not self._rates or rate > self.bytes_per_s):
            self._rates.append(rate)

    def cost(self, round_trip_ns: int) -> Cost:
        return Cost(round_trip_ns, self.bytes_per_s)
