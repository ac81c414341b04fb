"""Spikes: what a training does on purpose is none, and what is out of all proportion is."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.numbers.spikes import LEAST_STEPS, LEVEL_STEPS, Spikes
from keepstep.model.numbers import OVERFLOW, Sign


def settled(seed: int = 0, steps: int = 200, noise: float = 0.1) -> Spikes:
    rng = random.Random(seed)
    spikes = Spikes(compares=True)
    for step in range(steps):
        spikes.accept(
            rng.lognormvariate(0, noise), 3.0 * math.exp(-step / 400) * rng.lognormvariate(0, noise)
        )
    return spikes


@given(st.integers(0, 1000), st.floats(101, 1e30))
def test_a_gradient_beyond_all_proportion_is_told(seed: int, factor: float) -> None:
    assert settled(seed).look(2 * factor, None) is Sign.EXPLOSION
    assert settled(seed).may_be_far(2 * factor)


@given(st.integers(0, 1000), st.floats(101, 1e6))
def test_a_gradient_smaller_than_the_model_is_told_in_no_case(seed: int, factor: float) -> None:
    assert settled(seed).look(2 * factor, None, size=3 * factor) is None


@given(st.integers(0, 1000), st.integers(2, 400), st.booleans())
def test_steps_without_a_gradient_say_nothing_of_how_great_one_is(
    seed: int, apart: int, compares: bool
) -> None:
    rng = random.Random(seed)
    spikes = Spikes(compares)
    for step in range(20 * apart):
        norm = 0.0 if step % apart else rng.lognormvariate(0, 1)
        assert spikes.look(norm, norm) is None
        spikes.accept(norm, norm)


@given(st.integers(0, 1000), st.integers(2, 9))
def test_optimizers_that_take_turns_have_each_their_level(seed: int, turns: int) -> None:
    rng = random.Random(seed)
    spikes = Spikes(compares=True)
    for step in range(100 * turns):
        turn = step % turns
        norm = 100.0**turn * rng.lognormvariate(0, 0.3)
        assert spikes.look(norm, norm, by=turn) is None
        spikes.accept(norm, norm, by=turn)
    assert spikes.look(1e6, None, by=0) is Sign.EXPLOSION


@given(st.integers(0, 1000))
def test_a_greater_gradient_needs_a_greater_loss(seed: int) -> None:
    spikes = settled(seed)
    assert spikes.look(30.0, 2.0) is None
    assert spikes.look(30.0, None) is None
    assert spikes.look(1.0, 50.0) is None
    assert spikes.look(30.0, 50.0) is Sign.SPIKE
    spikes._compares = False
    assert spikes.look(30.0, 50.0) is None and spikes.look(1e9, 50.0) is None


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(allow_nan=True))
def test_nothing_is_judged_before_there_is_enough_to_judge_by(norm: float, loss: float) -> None:
    spikes = settled(steps=LEAST_STEPS - 1)
    assert spikes.look(norm, loss) is None or norm > OVERFLOW


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None])
def test_what_is_not_finite_is_looked_for_elsewhere(value: float | None) -> None:
    spikes = settled()
    assert spikes.look(value, 1.0) is None
    spikes.accept(value, value)
    assert spikes.look(1.0, 1.0) is None
    assert spikes.look(1e9, 1.0) is Sign.EXPLOSION


def test_a_level_that_stays_is_normal_in_the_end() -> None:
    spikes = settled()
    for _ in range(LEVEL_STEPS):
        assert spikes.look(1000.0, 100.0) is Sign.EXPLOSION
        spikes.accept(1000.0, 100.0)
    for _ in range(300):
        assert spikes.look(1000.0, 100.0) is None
        spikes.accept(1000.0, 100.0)
    assert spikes.look(1e6, 100.0) is Sign.EXPLOSION


def test_what_passes_once_leaves_the_level_as_it_is() -> None:
    spikes = settled()
    spikes.accept(1000.0, 100.0)
    for _ in range(50):
        spikes.accept(1.0, 1.0)
    assert spikes.look(1000.0, 100.0) is Sign.EXPLOSION


def curve(seed: int, steps: int) -> list[tuple[float | None, float]]:
    """Gradient norm and loss of a training with a warm-up, jumps of the gradients by 3 and 10
    either way, harder data for a while, and steps that a loss scaler skips."""
    rng = random.Random(seed)
    found: list[tuple[float | None, float]] = []
    loss, level = 8.0, 1.0
    for step in range(steps):
        if step % 1500 == 700:
            level *= rng.choice([0.1, 0.33, 3.0, 10.0])
        hard = 2.5 if 4000 <= step < 5500 else 1.0
        warm = min(1.0, (step + 1) / 200)
        loss += 0.01 * (2.0 - loss)
        norm = level * hard * (1 + 4 * (1 - warm)) * rng.lognormvariate(0, 0.35)
        is_natural = rng.random() < 0.003  # spikes of a healthy training
        factor = rng.uniform(1.5, 2.5) if is_natural else 1.0
        is_skipped = rng.random() < 0.01
        told = loss * hard * factor * rng.lognormvariate(0, 0.1)
        found.append((None if is_skipped else norm * factor, told))
    return found


@settings(max_examples=10)
@given(st.integers(0, 10_000))
def test_ten_thousand_steps_of_a_healthy_training_raise_no_alarm(seed: int) -> None:
    spikes = Spikes(compares=True)
    for norm, loss in curve(seed, 10_000):
        assert spikes.look(norm, loss) is None
        spikes.accept(norm, loss)


@given(st.floats(1.9e19, 1e300), st.booleans())
def test_what_no_optimizer_can_square_is_told_at_any_time(norm: float, compares: bool) -> None:
    assert Spikes(compares).look(norm, None, size=1e30) is Sign.EXPLOSION


@pytest.mark.parametrize("known", [0, 5, LEAST_STEPS - 1, LEAST_STEPS])
def test_a_loss_is_judged_once_enough_of_them_are_known(known: int) -> None:
    """Some programs tell theirs now and then only."""
    spikes = Spikes(True)
    for step in range(2 * LEAST_STEPS):
        spikes.accept(1.0 + 0.01 * (step % 3), 1.0 + 0.01 * (step % 5) if step < known else None)
    assert spikes.look(50.0, 100.0) is (Sign.SPIKE if known == LEAST_STEPS else None)
