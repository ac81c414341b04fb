"""Where captures take several steps, `status` and the dashboard say what a kill costs, and why."""

from __future__ import annotations

import pytest

from keepstep.core.resume.cadence import at_most_lost_steps
from keepstep.dashboard.sentences import period_words


def test_nothing_is_said_where_a_capture_fits_into_a_step() -> None:
    assert period_words(1) is None and at_most_lost_steps(1) == 1


@pytest.mark.parametrize(("period", "bound"), [(2, 3), (3, 5), (5, 9)])
def test_the_bound_is_said_with_its_reason(period: int, bound: int) -> None:
    said = period_words(period)
    assert said is not None
    assert f"takes up to {period} steps" in said.text
    assert f"costs up to {bound} completed steps" in said.text


@pytest.mark.parametrize("period", range(1, 9))
def test_up_to_a_period_of_two_it_is_no_more_than_one_capture_and_a_step(period: int) -> None:
    """docs/protocol.md: from three on it is period - 2 more."""
    beyond = at_most_lost_steps(period) - (period + 1)
    assert beyond == period - 2
