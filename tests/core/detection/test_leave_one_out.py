"""OthersMedian, against the dumb way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.detection.drift import median
from keepstep.core.detection.leave_one_out import OthersMedian

NUMBERS = st.dictionaries(st.integers(0, 20), st.integers(0, 9).map(float), min_size=2)


@given(NUMBERS, st.sets(st.integers(0, 20)))
def test_it_is_the_median_of_those_that_count_without_one(
    by_rank: dict[int, float], left_out: set[int]
) -> None:
    counted = by_rank.keys() - left_out
    others = OthersMedian(by_rank, counted)
    for rank in by_rank:
        if peers := counted - {rank}:
            assert others.of(rank) == median(by_rank[peer] for peer in peers)
