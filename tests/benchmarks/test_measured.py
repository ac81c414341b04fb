"""Measured: durations of which some were cut off are spread as the whole ones would have been."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.prediction.measured import QUANTILES, spread

DURATIONS = st.lists(st.integers(1, 1000), max_size=30)


@given(DURATIONS, DURATIONS)
def test_a_spread_is_made_of_what_was_seen_and_never_favours_the_short(
    took: list[int], cut_off: list[int]
) -> None:
    found = spread(took, cut_off)
    if not took:
        assert found == ()
        return
    assert len(found) == QUANTILES and list(found) == sorted(found)
    assert set(found) <= {*took, max([*took, *cut_off])}
    whole = spread(took, [])
    assert all(cut >= uncut for cut, uncut in zip(found, whole, strict=True))


def test_a_spread_of_durations() -> None:
    assert spread([], [5]) == () and set(spread([3], [])) == {3}
    assert spread(range(1, 21), []) == tuple(range(1, 21))
    # One of three is cut off at 2: what is left of it lies where longer ones are.
    assert [spread([1, 3], [2]).count(d) for d in (1, 2, 3)] == [7, 0, 13]
