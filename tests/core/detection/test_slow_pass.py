"""Slow pass: a pass is named where it alone takes longer, and the body where all in it does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.detection.slow_pass import slow_part as slow_part_of
from keepstep.model.step_work import Section

BODY, FORWARD, BACKWARD = Section.COMPUTE, Section.FORWARD, Section.BACKWARD


def slow_part(now: dict[Section, float], before: dict[Section, float]) -> Section:
    """Of blocks that do not vary."""
    return slow_part_of([now] * 3, [before] * 30)


def took(body: float, forward: float, backward: float) -> dict[Section, float]:
    """Milliseconds."""
    return {BODY: 1e6 * body, FORWARD: 1e6 * forward, BACKWARD: 1e6 * backward}


@pytest.mark.parametrize(
    ("now", "before", "named"),
    [
        (took(150, 80, 60), took(100, 30, 60), FORWARD),
        (took(150, 30, 110), took(100, 30, 60), BACKWARD),
        (took(150, 55, 85), took(100, 30, 60), BODY),  # both, by the same time
        (took(150, 45, 90), took(100, 30, 60), BODY),  # both, by the same share
        (took(150, 15, 120), took(100, 10, 80), BODY),  # likewise, and one is most of it
        (took(150, 30, 60), took(100, 30, 60), BODY),  # what is neither
        (took(150, 3, 145), took(100, 2, 95), BACKWARD),  # there is hardly anything else
        (took(150, 0, 0), took(100, 0, 0), BODY),  # nobody sees passes
        (took(150, 50, 100), took(100, 0, 0), BODY),  # nobody saw them before
        (took(100, 25, 65), took(100, 30, 60), BACKWARD),
        (took(90, 25, 55), took(100, 30, 60), BODY),
    ],
)
def test_what_has_grown_alone_is_named(
    now: dict[Section, float], before: dict[Section, float], named: Section
) -> None:
    assert slow_part(now, before) is named


SHARES = st.tuples(st.floats(0.05, 1), st.floats(0.05, 1), st.floats(0.2, 1))


@given(SHARES, st.floats(1.05, 10))
def test_a_slower_processor_is_slow_in_all_of_the_body(
    shares: tuple[float, float, float], factor: float
) -> None:
    forward, backward, _ = shares
    before = took(sum(shares), forward, backward)
    if max(forward, backward) < 0.9 * sum(shares):
        assert slow_part({s: ns * factor for s, ns in before.items()}, before) is BODY


@given(SHARES, st.sampled_from([FORWARD, BACKWARD]), st.floats(1.05, 10))
def test_a_pass_alone_is_named_however_small_it_is(
    shares: tuple[float, float, float], part: Section, factor: float
) -> None:
    before = took(sum(shares), *shares[:2])
    more = before[part] * (factor - 1)
    now = {**before, part: before[part] + more, BODY: before[BODY] + more}
    assert slow_part(now, before) is part


def test_what_noise_may_have_made_is_of_the_body() -> None:
    """Three blocks in which the larger pass is longer by as much as it is by turns anyway."""
    before = [took(100, 30, 60 + off) for off in (-6, 6, -3, 3, 0)] * 6
    longer = took(107, 30, 67)
    assert slow_part_of([longer] * 3, before) is BODY
    assert slow_part_of([longer] * 3, [took(100, 30, 60)] * 30) is BACKWARD


def test_a_clock_that_went_back_ends_nobody() -> None:
    """Sums that begin anew, or a page that somebody has damaged, make a block of less than none."""
    back = {BODY: -1.3e10, FORWARD: -4e9, BACKWARD: -8e9}
    now = [back, *[took(150, 80, 60)] * 4]
    assert slow_part_of(now, [took(100, 30, 60)] * 30) is FORWARD
