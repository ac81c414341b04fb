"""The rhythm of a trainer's network: what is learnt from steps, and when it is given up."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.pacing.step_profile import (
    CHANGED_RATIO,
    CHANGED_STEPS,
    FIRST_STEPS,
    FULL_STEPS,
    LEAST_MU,
    MOST_MU,
    Idle,
    Profile,
    Rhythm,
    average,
    difference,
    intersection,
    mu_of,
)
from keepstep.model.rhythm import Gap, StepSeen
from keepstep.model.units import MS_NS

lengths = st.lists(st.integers(1, 100 * MS_NS), min_size=1, max_size=6)


def a_step(
    number: int, idle_ns: list[int], busy_ns: int = 10 * MS_NS, began_ns: int = 0
) -> StepSeen:
    """Idle, a collective, idle, a collective .. idle; a gap of no length is not seen."""
    at_ns, gaps = began_ns, []
    for index, length_ns in enumerate(idle_ns):
        at_ns += busy_ns if index else 0
        gaps.append(Gap(index, at_ns, at_ns + length_ns))
        at_ns += length_ns
    return StepSeen(
        number,
        began_ns,
        at_ns,
        len(idle_ns) - 1,
        tuple(gap for gap in gaps if gap.ended_ns > gap.began_ns),
    )


def learnt(idle_ns: list[int], steps: int = FULL_STEPS) -> Rhythm:
    rhythm = Rhythm()
    for number in range(steps):
        rhythm.saw(a_step(number, idle_ns))
    return rhythm


@given(lengths, st.integers(1, 30), st.integers(0, 10**12))
def test_equal_steps_are_their_own_average(idle_ns: list[int], steps: int, began_ns: int) -> None:
    found = average([a_step(n, idle_ns, began_ns=began_ns * n) for n in range(steps)])
    assert found is not None
    assert [(s.index, s.length_ns, s.spread_ns) for s in found.spans] == [
        (i, length, 0) for i, length in enumerate(idle_ns)
    ]
    assert found.idle_ns == sum(idle_ns) and found.step_ns == sum(idle_ns) + 10 * MS_NS * (
        len(idle_ns) - 1
    )
    assert (found.spread_ratio, found.mu) == (0, mu_of(0, steps))


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_is_within_a_tenth_of_the_truth_and_mu_is_below_most_spans(seed: int) -> None:
    rng = random.Random(seed)
    truth = [30 * MS_NS, 8 * MS_NS, 50 * MS_NS]
    steps = [
        a_step(n, [round(rng.gauss(mean, 0.08 * mean)) for mean in truth])
        for n in range(FULL_STEPS)
    ]
    found = average(steps)
    assert found is not None
    for span, mean in zip(found.spans, truth, strict=True):
        assert abs(span.length_ns - mean) < 0.1 * mean
        shorter = sum(
            g.ended_ns - g.began_ns < found.mu * span.length_ns
            for s in steps
            for g in s.gaps
            if g.index == span.index
        )
        assert shorter <= FULL_STEPS // 5
    assert found.spread_ratio < 0.12


@given(st.lists(st.integers(0, 100 * MS_NS), min_size=4, max_size=40))
def test_two_deviations_below_the_mean_lies_at_most_a_fifth(spans_ns: list[int]) -> None:
    """Cantelli's inequality, on which mu relies, for any spans whatever."""
    mean, spread = statistics.fmean(spans_ns), statistics.pstdev(spans_ns)
    assert 5 * sum(span < mean - 2 * spread for span in spans_ns) <= len(spans_ns)


@given(st.floats(0, 3), st.floats(0, 3), st.integers(1, 100))
def test_mu_is_a_part_and_falls_with_the_spread(a: float, b: float, steps: int) -> None:
    assert LEAST_MU <= mu_of(a, steps) <= MOST_MU
    assert (
        mu_of(max(a, b), steps) <= mu_of(min(a, b), steps) <= mu_of(min(a, b), steps + FULL_STEPS)
    )


def test_a_gap_that_vanishes_in_some_steps_shifts_no_other() -> None:
    steps = [a_step(n, [20 * MS_NS, (n % 2) * 10 * MS_NS, 30 * MS_NS]) for n in range(FULL_STEPS)]
    found = average(steps)
    assert found is not None
    assert [(s.index, s.length_ns) for s in found.spans] == [
        (0, 20 * MS_NS),
        (1, 5 * MS_NS),
        (2, 30 * MS_NS),
    ]
    assert found.spans[1].spread_ns == 5 * MS_NS and found.mu < MOST_MU


def test_odd_steps_do_not_count() -> None:
    usual, slow, short = [10 * MS_NS] * 3, [500 * MS_NS] * 3, [10 * MS_NS] * 2
    found = average([a_step(0, slow), *(a_step(n, usual) for n in range(1, 8)), a_step(8, short)])
    assert found == replace(average([a_step(0, usual)]) or found, steps=7)


def test_no_rhythm() -> None:
    assert average([]) is None
    steps = [a_step(n, [10 * MS_NS] * (1 + n % 3)) for n in range(FULL_STEPS)]
    assert average(steps) is None
    rhythm = Rhythm()
    for step in steps:
        rhythm.saw(step)
    assert rhythm.profile is None and "there is no rhythm" in rhythm.why


def test_there_is_a_first_profile_soon_a_full_one_later_and_then_another_now_and_again() -> None:
    rhythm, told = Rhythm(), []
    for number in range(3 * FULL_STEPS):
        if rhythm.saw(a_step(number, [40 * MS_NS, 20 * MS_NS])):
            assert rhythm.profile is not None
            told.append((number + 1, rhythm.profile.steps))
    assert told[0] == (FIRST_STEPS, FIRST_STEPS) and told[1] == (FULL_STEPS, FULL_STEPS)
    assert [steps for _, steps in told[2:]] == [FULL_STEPS] * len(told[2:]) and len(told) == 4
    assert rhythm.why == (
        "the network is idle for 60.0 ms of a step's 70.0 ms, in 2 spans between 1 "
        "collectives, within 0% (mean of 20 steps): "
        "95% of each is counted on"
    )


@given(lengths, st.floats(1 - 0.9 * CHANGED_RATIO, 1 + 0.9 * CHANGED_RATIO))
def test_a_little_faster_or_slower_is_the_same_rhythm(idle_ns: list[int], factor: float) -> None:
    known = average([a_step(0, idle_ns)])
    assert known is not None
    assert (
        difference(known, a_step(1, [int(factor * length) for length in idle_ns])) is None
        or sum(idle_ns) < 100
    )


@given(lengths.filter(lambda idle: len(idle) > 1), st.sampled_from([0.5, 1.6, 3.0]), st.booleans())
def test_another_rhythm_is_seen_within_some_steps_and_learnt_from_them(
    idle_ns: list[int], factor: float, fewer: bool
) -> None:
    rhythm = learnt(idle_ns)
    other = [int(factor * length) for length in idle_ns[: -1 if fewer else None]]
    changed = [
        rhythm.saw(a_step(n, other, busy_ns=int(factor * 10 * MS_NS))) for n in range(CHANGED_STEPS)
    ]
    assert changed == [False] * (CHANGED_STEPS - 1) + [True]
    assert (
        rhythm.profile is not None
        and rhythm.profile.idle_ns == sum(other)
        and rhythm.profile.steps == CHANGED_STEPS
    )
    assert rhythm.why.startswith("the rhythm has changed: ")


@given(lengths, st.lists(st.integers(1, CHANGED_STEPS - 1), max_size=5))
def test_a_few_odd_steps_between_usual_ones_change_nothing(
    idle_ns: list[int], bursts: list[int]
) -> None:
    rhythm = learnt(idle_ns)
    before = rhythm.profile
    for burst in bursts:
        for n in range(burst):
            assert not rhythm.saw(a_step(n, [*idle_ns, 5]))
        rhythm.saw(a_step(0, idle_ns))
    assert rhythm.profile == before


intervals = st.lists(st.integers(0, 60), min_size=0, max_size=8, unique=True).map(sorted)


def profile_of(edges: list[int]) -> Profile:
    spans = [
        Idle(i, a, b - a, 0) for i, (a, b) in enumerate(zip(edges[::2], edges[1::2], strict=False))
    ]
    return Profile(20, 60, len(spans), tuple(spans))


@given(st.lists(intervals, max_size=4))
def test_a_nodes_idle_spans_are_those_of_all_its_ranks(ranks: list[list[int]]) -> None:
    profiles = [profile_of(edges) for edges in ranks]
    found = intersection(profiles)

    def idle(spans: tuple[tuple[int, int], ...], at: float) -> bool:
        return any(a < at < b for a, b in spans)

    for tick in range(60):
        at = tick + 0.5
        each = [idle(tuple((s.began_ns, s.ended_ns) for s in p.spans), at) for p in profiles]
        assert idle(found, at) == (bool(profiles) and all(each))
