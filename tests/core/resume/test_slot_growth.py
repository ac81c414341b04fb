"""One more slot is wanted when captures find none free again and again, and not before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.resume.slot_growth import FULL_STEPS, WITHIN_STEPS, SlotGrowth


def test_some_within_not_too_many_steps() -> None:
    growth = SlotGrowth()
    assert [growth.found_none_free(step) for step in range(FULL_STEPS)] == [
        *[False] * (FULL_STEPS - 1),
        True,
    ]


def test_what_is_long_ago_does_not_count() -> None:
    growth = SlotGrowth()
    apart = WITHIN_STEPS // (FULL_STEPS - 1) + 1
    assert not any(growth.found_none_free(step * apart) for step in range(20))


@given(st.lists(st.integers(1, WITHIN_STEPS), max_size=60))
def test_each_asks_for_evidence_of_its_own(gaps: list[int]) -> None:
    growth, step, since = SlotGrowth(), 0, 0
    for gap in gaps:
        step += gap
        since += 1
        if growth.found_none_free(step):
            assert since >= FULL_STEPS
            since = 0
