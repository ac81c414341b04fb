"""Intervals: the formulas against each other, against searching, and against failures drawn one by
one."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.economics.intervals import daly, optimal, with_silent_errors, young
from tests.core.economics.work_ratio import work_ratio

stalls = st.floats(1e-3, 1e4)
mtbfs = st.floats(60, 1e8)


@given(stall_s=stalls, mtbf_s=mtbfs, factor=st.floats(0.01, 100))
def test_no_other_interval_is_better_than_the_exact_one(
    stall_s: float, mtbf_s: float, factor: float
) -> None:
    best_s = optimal(stall_s, mtbf_s)
    other_s = min(best_s * factor, 300 * mtbf_s)
    assert work_ratio(other_s, stall_s, mtbf_s) <= work_ratio(best_s, stall_s, mtbf_s) * (1 + 1e-9)


@given(ratio=st.floats(1e-8, 5), mtbf_s=mtbfs)
def test_the_exact_interval_fulfils_its_condition(ratio: float, mtbf_s: float) -> None:
    stall_s = ratio * mtbf_s
    best_s = optimal(stall_s, mtbf_s)
    assert 0 < best_s < mtbf_s
    assert math.exp((best_s + stall_s) / mtbf_s) * (1 - best_s / mtbf_s) == pytest.approx(
        1, abs=1e-9
    )


@given(mtbf_s=mtbfs, ratio=st.floats(1e-8, 0.08))
def test_young_and_daly_come_close_where_a_checkpoint_is_cheap(mtbf_s: float, ratio: float) -> None:
    stall_s = ratio * mtbf_s
    best = work_ratio(optimal(stall_s, mtbf_s), stall_s, mtbf_s)
    assert daly(stall_s, mtbf_s) == pytest.approx(optimal(stall_s, mtbf_s), rel=1e-3)
    assert best - work_ratio(daly(stall_s, mtbf_s), stall_s, mtbf_s) < 1e-6
    assert best - work_ratio(young(stall_s, mtbf_s), stall_s, mtbf_s) < 0.005


def test_a_checkpoint_that_costs_nothing_is_taken_always() -> None:
    assert optimal(0.0, 3600.0) == 0.0


def test_a_restart_lowers_every_interval_alike() -> None:
    ratios = [
        work_ratio(tau, 60, 3600) / work_ratio(tau, 60, 3600, restart_s=300)
        for tau in (100, 600, 3000)
    ]
    assert ratios == pytest.approx([math.exp(300 / 3600)] * 3)


def test_the_model_is_what_failures_drawn_one_by_one_give() -> None:
    """2,000 hours of work in segments, each done again until no failure strikes in it, nor in the
    restart before."""
    draw = random.Random(5)
    interval_s, stall_s, mtbf_s, restart_s, segments = 1200.0, 60.0, 3600.0, 300.0, 6000
    total_s, to_failure_s = 0.0, draw.expovariate(1 / mtbf_s)
    for _ in range(segments):
        needed_s = interval_s + stall_s
        while to_failure_s < needed_s:
            total_s += to_failure_s
            to_failure_s, needed_s = draw.expovariate(1 / mtbf_s), restart_s + interval_s + stall_s
        total_s += needed_s
        to_failure_s -= needed_s
    # Here the restart comes after a failure only, not before every segment: Daly's formula with
    # e^(R/M) once a failure.
    attempts = math.expm1((interval_s + stall_s) / mtbf_s) * math.exp(restart_s / mtbf_s) * mtbf_s
    assert segments * interval_s / total_s == pytest.approx(interval_s / attempts, rel=0.03)
    assert work_ratio(interval_s, stall_s, mtbf_s, restart_s) == pytest.approx(
        interval_s / attempts
    )


def test_silent_errors_bound_the_interval_by_what_is_kept() -> None:
    plain = optimal(10, 1 / (1 / 3600 + 1 / 86400))
    assert with_silent_errors(10, 3600, 86400, latency_s=0, kept=2) == plain
    assert with_silent_errors(10, 3600, 86400, latency_s=7200, kept=2) == 7200, (
        "one whole checkpoint must be older than the latency"
    )
    assert with_silent_errors(10, 3600, 86400, latency_s=7200, kept=100) == plain
    with pytest.raises(AssertionError):
        with_silent_errors(10, 3600, 86400, latency_s=7200, kept=1)
