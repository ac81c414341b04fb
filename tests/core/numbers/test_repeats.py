"""Repeats: how far apart runs of one step may be, from clean runs of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.numbers.repeats import MARGIN, WIDEST, calibrated, distance
from keepstep.model.numbers import SKETCH_SUMS, Sight, StepRun, Way


def sight(rank: int, digest: str, *sketch: float) -> Sight:
    return Sight(rank, rank, digest=digest, sketch=sketch)


def runs(*sketches: float, world: int = 2) -> list[StepRun]:
    """One for each; rank 0's gradients have that sum, the others' are always the same."""
    return [
        StepRun(
            Way.AGAIN,
            tuple(
                sight(rank, f"{value!r}" if rank == 0 else "same", value if rank == 0 else 1.0)
                for rank in range(world)
            ),
        )
        for value in sketches
    ]


def test_the_same_bits_each_time_allow_nothing() -> None:
    found = calibrated(2, runs(1.0, 1.0, 1.0))
    assert found.is_exact and found.within == 0.0
    assert "3 times" in found.why and "the same bits" in found.why


@given(st.floats(1e-9, WIDEST / MARGIN * 0.9))
def test_what_clean_runs_differ_by_is_allowed_with_a_margin(apart: float) -> None:
    found = calibrated(2, runs(1.0, 1.0, 1.0 + apart))
    assert found.is_known and not found.is_exact
    assert found.within == pytest.approx(MARGIN * apart / (1.0 + apart), rel=1e-5)
    assert "rank 0" in found.why


@pytest.mark.parametrize("other", [1.5, -1.0, float("nan"), float("inf")])
def test_where_they_are_far_apart_nothing_is_allowed(other: float) -> None:
    found = calibrated(2, runs(1.0, other))
    assert not found.is_known and not found.is_exact and found.within == 0.0


def test_without_digests_nothing_is_known() -> None:
    found = calibrated(2, [StepRun(Way.AGAIN, (Sight(0, 0),))] * 2)
    assert not found.is_known and found.within == 0.0


def test_other_bits_with_equal_sums_are_no_exact_repeat() -> None:
    one, other = runs(1.0, 1.0)
    other = replace(other, seen=(replace(other.seen[0], digest="others"), other.seen[1]))
    found = calibrated(2, [one, other])
    assert found.is_known and not found.is_exact and 0.0 < found.within < 1e-9


def test_the_distance_of_sums_is_about_that_of_what_they_are_of() -> None:
    """Gaussian differences of a hundredth of the size: within the margin in each of 200."""
    drawn = random.Random(1)
    for _ in range(200):
        values = [drawn.gauss(0, 1) for _ in range(200)]
        moved = [value + drawn.gauss(0, 0.01) for value in values]
        signs = [[drawn.choice((-1, 1)) for _ in values] for _ in range(SKETCH_SUMS)]
        one, other = (
            tuple(sum(s * v for s, v in zip(row, kind, strict=True)) for row in signs)
            for kind in (values, moved)
        )
        found = distance(sight(0, "a", *one), sight(0, "b", *other))
        assert 0.01 / MARGIN < found < 0.01 * MARGIN
