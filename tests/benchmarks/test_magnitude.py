"""Recall by magnitude: each flip is in one range, and none is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.magnitude import RANGES, by_magnitude

FLIPS = st.lists(
    st.fixed_dictionaries(
        {"bit": st.integers(0, 31), "digests": st.booleans(), "buddy": st.booleans()}
    ),
    max_size=80,
)


def test_each_bit_is_in_one_range_and_the_greatest_change_comes_first() -> None:
    assert [bit for bits in RANGES.values() for bit in reversed(bits)] == list(range(31, -1, -1))


@given(FLIPS)
def test_the_ranges_add_up_to_all(flips: list[dict[str, int]]) -> None:
    found = by_magnitude(flips)
    assert sum(part["changing"] for part in found.values()) == len(flips)
    assert sum(part["either"] for part in found.values()) == sum(
        flip["digests"] or flip["buddy"] for flip in flips
    )
    for name, part in found.items():
        low, high = part["interval"]
        assert 0 <= low < high <= 1
        if part["changing"]:
            share = part["either"] / part["changing"]
            assert low - 1e-9 <= share <= high + 1e-9, name
