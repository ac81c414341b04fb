"""Confidence: intervals hold the truth as often as they say."""

from __future__ import annotations

import math
import random
from math import comb

import pytest

from keepstep.sim.economics.confidence import mean_interval, share_interval, student

# Tables of Student's distribution, to four digits.
TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 19: 2.0930, 120: 1.9799}


@pytest.mark.parametrize(("degrees", "quantile"), TABLE.items())
def test_student_is_the_table(degrees: int, quantile: float) -> None:
    assert student(degrees, 0.975) == pytest.approx(quantile, rel=0.0015)


@pytest.mark.parametrize("count", [2, 3, 5, 20])
def test_the_mean_is_inside_in_95_of_100_draws(count: int) -> None:
    draw, trials, hits = random.Random(count), 4000, 0
    for _ in range(trials):
        low, high = mean_interval([draw.gauss(3, 2) for _ in range(count)])
        hits += low <= 3 <= high
    assert abs(hits / trials - 0.95) < 4 * math.sqrt(0.95 * 0.05 / trials)


def test_one_value_says_nothing() -> None:
    assert mean_interval([0.9]) == (-math.inf, math.inf)


@pytest.mark.parametrize(("trials", "chance"), [(50, 0.5), (200, 0.9), (1000, 0.99)])
def test_a_share_is_inside_about_95_of_100_times(trials: int, chance: float) -> None:
    inside = 0.0
    for hits in range(trials + 1):
        low, high = share_interval(hits, trials)
        if low <= chance <= high:
            inside += comb(trials, hits) * chance**hits * (1 - chance) ** (trials - hits)
    assert 0.92 < inside < 0.98


def test_shares_at_the_ends_are_not_certain() -> None:
    assert share_interval(0, 0) == (0.0, 1.0)
    low, high = share_interval(20, 20)
    assert 0.8 < low < 0.9 and high == pytest.approx(1.0)
    low, high = share_interval(0, 20)
    assert low == pytest.approx(0.0) and 0.1 < high < 0.2
