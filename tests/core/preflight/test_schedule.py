"""Rounds of pairs: everybody meets everybody, nobody is in two places."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.preflight.schedule import (
    MOST_ALONE,
    Rounds,
    all_pairs,
    busy,
    confirming,
    packed,
)


def check_rounds(rounds: Rounds) -> None:
    for pairs in rounds:
        assert len(busy(pairs)) == 2 * len(pairs)
        assert all(one < other for one, other in pairs)


@given(st.sets(st.integers(0, 100), min_size=2, max_size=40))
def test_every_pair_once_in_as_few_rounds_as_there_can_be(nodes: set[int]) -> None:
    rounds = all_pairs(sorted(nodes))
    check_rounds(rounds)
    met = [each for pairs in rounds for each in pairs]
    assert sorted(met) == sorted(combinations(sorted(nodes), 2))
    assert len(rounds) == len(nodes) - (len(nodes) % 2 == 0)


@given(st.integers(2, 40), st.integers(1, 40))
def test_some_rounds_give_each_node_as_many_partners(nodes: int, rounds: int) -> None:
    taken = all_pairs(range(nodes))[:rounds]
    for node in range(nodes):
        partners = sum(node in busy(pairs) for pairs in taken)
        assert len(taken) - (nodes % 2) <= partners <= len(taken)


@given(st.sets(st.integers(0, 20), min_size=1), st.sets(st.integers(21, 40)), st.integers(0, 5))
def test_each_suspect_has_a_good_partner_another_one_each_turn(
    suspects: set[int], good: set[int], turn: int
) -> None:
    rounds = confirming(sorted(suspects), sorted(good), [], turn)
    check_rounds(rounds)
    partners = {one: other for pairs in rounds for one, other in pairs}
    assert set(partners) == (suspects if good else set())
    assert set(partners.values()) <= good
    if len(good) > 1:
        after = confirming(sorted(suspects), sorted(good), [], turn + 1)
        later = {one: other for pairs in after for one, other in pairs}
        assert all(partners[node] != later[node] for node in suspects)


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(10, 19)), max_size=30))
def test_packing_loses_and_doubles_nothing(pairs: set[tuple[int, int]]) -> None:
    rounds = packed([*sorted(pairs), *sorted(pairs)])
    check_rounds(rounds)
    assert sorted(each for taken in rounds for each in taken) == sorted(pairs)


def test_slow_pairs_are_measured_again() -> None:
    rounds = confirming([1, 2], [0], [(1, 2)], 0)
    assert {each for pairs in rounds for each in pairs} == {(0, 1), (0, 2), (1, 2)}


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(10, 19)), min_size=1, max_size=30))
def test_slow_pairs_are_alone_where_they_are_few(pairs: set[tuple[int, int]]) -> None:
    """Two that are slow together may share something."""
    rounds = confirming([0], [20], pairs, 0)
    check_rounds(rounds)
    assert sorted(each for taken in rounds for each in taken) == sorted({*pairs, (0, 20)})
    if len(pairs) > MOST_ALONE:
        assert rounds == packed([(0, 20), *sorted(pairs)])
    else:
        assert pairs <= {taken[0] for taken in rounds if len(taken) == 1}


def test_a_suspects_slow_pair_with_a_good_partner_is_measured_once() -> None:
    assert confirming([1], [0], [(0, 1), (1, 2)], 0) == (((0, 1),), ((1, 2),))
