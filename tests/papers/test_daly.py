"""Young (1974) and Daly (2006): the optimum checkpoint interval, against a grid and against
Lambert's W as the literature writes it."""

from __future__ import annotations

import math

import pytest

from keepstep.core.economics.intervals import daly, optimal, young
from tests.core.economics.work_ratio import work_ratio

# Stall and mean time between failures, in seconds: from a fast store on a small job to C/M where
# Young is no longer good.
CASES = [(1, 1_000_000), (10, 100_000), (60, 86_400), (300, 25_200), (481, 10_800), (300, 3600)]


@pytest.mark.parametrize(("stall_s", "mtbf_s"), CASES)
def test_the_exact_interval_is_the_best_of_a_grid(stall_s: float, mtbf_s: float) -> None:
    grid = [young(stall_s, mtbf_s) * (0.3 + 0.0005 * i) for i in range(3000)]
    best_s = max(grid, key=lambda tau: work_ratio(tau, stall_s, mtbf_s))
    assert optimal(stall_s, mtbf_s) == pytest.approx(best_s, rel=0.001)


@pytest.mark.parametrize(("stall_s", "mtbf_s"), CASES)
def test_daly_is_within_a_thousandth_of_the_exact_interval(stall_s: float, mtbf_s: float) -> None:
    assert daly(stall_s, mtbf_s) == pytest.approx(optimal(stall_s, mtbf_s), rel=0.001)


@pytest.mark.parametrize(("stall_s", "mtbf_s"), CASES)
def test_young_costs_less_than_a_quarter_of_a_point(stall_s: float, mtbf_s: float) -> None:
    """Where C/M <= 0.083; the last case is just there."""
    assert stall_s / mtbf_s <= 1 / 12
    lost = work_ratio(optimal(stall_s, mtbf_s), stall_s, mtbf_s) - work_ratio(
        young(stall_s, mtbf_s), stall_s, mtbf_s
    )
    assert 0 <= lost < 0.0024


def lambert_w(x: float) -> float:
    """The main branch for -1/e < x < 0, by halving: slow and plain."""
    low, high = -1.0, 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.exp(middle) < x else (low, middle)
    return low


@pytest.mark.parametrize(("stall_s", "mtbf_s"), CASES)
def test_the_exact_interval_is_lamberts(stall_s: float, mtbf_s: float) -> None:
    expected = mtbf_s * (1 + lambert_w(-math.exp(-(1 + stall_s / mtbf_s))))
    assert optimal(stall_s, mtbf_s) == pytest.approx(expected, rel=1e-6)


def test_beyond_twice_the_mean_time_daly_takes_the_mean_time() -> None:
    assert daly(7200, 3600) == 3600 and daly(7199, 3600) < 3600


def test_saxena_is_no_better_than_the_exact_interval() -> None:
    """arXiv 2410.18124: Ts + sqrt(2 (Tf + Tr) Ts + Ts^2), the save included, in four cases under
    the exact model with restarts."""
    for stall_s, mtbf_s, restart_s in [
        (30, 86_400, 300),
        (300, 86_400, 600),
        (60, 7200, 300),
        (300, 3600, 600),
    ]:
        saxena_s = math.sqrt(2 * (mtbf_s + restart_s) * stall_s + stall_s**2)
        best = work_ratio(optimal(stall_s, mtbf_s), stall_s, mtbf_s, restart_s)
        assert work_ratio(saxena_s, stall_s, mtbf_s, restart_s) <= best
    assert best == pytest.approx(0.5462, abs=5e-5) and work_ratio(
        saxena_s, stall_s, mtbf_s, restart_s
    ) == pytest.approx(0.5407, abs=5e-5)
