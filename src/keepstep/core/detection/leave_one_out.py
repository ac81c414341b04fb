"""Leave one out: of each rank the median of the others.

Comes in: a number of each rank. Goes out: the median without one of them. The numbers are sorted
once, so a thousand ranks cost hardly more each than ten do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping

from keepstep.core.detection.drift import median


class OthersMedian:
    """Of one measure. counted: the ranks whose numbers count."""

    def __init__(self, by_rank: Mapping[int, float], counted: Collection[int]) -> None:
        self._by_rank = by_rank
        self._counted = frozenset(counted)
        self._ordered = sorted(by_rank[rank] for rank in self._counted)

    def of(self, rank: int) -> float:
        """Without this one. At least one other must count."""
        ordered = self._ordered
        if rank not in self._counted:
            return median(ordered)
        left_out = bisect_left(ordered, self._by_rank[rank])

        def at(number: int) -> float:
            return ordered[number if number < left_out else number + 1]

        count = len(ordered) - 1
        middle = count // 2
        return at(middle) if count % 2 else (at(middle - 1) + at(middle)) / 2
