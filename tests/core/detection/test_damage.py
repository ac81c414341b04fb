"""Who is named for damaged messages, and when."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.detection.damage import LEAST_COUNT, WINDOW_NS, LinkDamage, LinkDamages
from keepstep.model.units import S_NS

counts_by_second = st.lists(st.integers(0, 12), min_size=1, max_size=300)


@given(counts_by_second)
def test_it_is_told_only_of_so_many_within_a_minute_and_once_a_minute(grown: list[int]) -> None:
    damages, total = LinkDamages(), 0
    told: list[tuple[int, LinkDamage]] = []
    for second, more in enumerate(grown):
        total += more
        told += [(second, each) for each in damages.news({3: total}, second * S_NS)]
    window = WINDOW_NS // S_NS
    for second, each in told:
        seen = sum(grown[max(0, second - window) + 1 : second + 1])
        assert (each.node, each.count) == (3, seen) and seen >= LEAST_COUNT
    moments = [second for second, _ in told]
    assert all(b - a >= window for a, b in pairwise(moments))


@given(counts_by_second)
def test_what_stays_below_is_not_told(grown: list[int]) -> None:
    damages, total = LinkDamages(), 0
    for second, more in enumerate(grown):
        total += more and second % 7 == 0
        assert not list(damages.news({0: total}, second * S_NS))


def test_each_node_is_counted_by_itself() -> None:
    damages = LinkDamages()
    assert not list(damages.news({1: 0, 2: 0}, 0))
    named = [each.node for each in damages.news({1: LEAST_COUNT - 1, 2: LEAST_COUNT}, S_NS)]
    assert named == [2]
