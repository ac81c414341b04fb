"""Shares are the best there are, and whatever they are each micro-batch is computed once."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.balance.shares import (
    LEAST_SHARE,
    best_shares,
    equal_shares,
    step_ns,
    work_of,
)

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=4)


def dumb_best_ns(total: int, costs: list[int]) -> int:
    """Of all shares."""
    each = range(LEAST_SHARE, total + 1)
    return min(
        step_ns(shares, costs)
        for shares in product(each, repeat=len(costs))
        if sum(shares) == total
    )


@given(COSTS, st.integers(0, 5))
def test_no_shares_are_done_sooner(costs: list[int], more: int) -> None:
    total = LEAST_SHARE * len(costs) + more
    found = best_shares(total, costs)
    assert sum(found) == total and min(found) >= LEAST_SHARE
    assert step_ns(found, costs) == dumb_best_ns(total, costs)


def test_a_rank_at_half_speed_has_half_as_many() -> None:
    assert best_shares(28, [10, 10, 20, 10]) == (8, 8, 4, 8)


@st.composite
def shares(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(LEAST_SHARE, 12), min_size=1, max_size=6)))


@given(shares())
def test_each_micro_batch_is_computed_once_and_has_its_home(given: tuple[int, ...]) -> None:
    work = work_of(given)
    assert tuple(map(len, work)) == given
    pieces = [piece for mine in work for piece in mine]
    assert sorted(piece.index for piece in pieces) == list(range(sum(given)))
    homes = equal_shares(sum(given), len(given))
    firsts = [sum(homes[:rank]) for rank in range(len(homes) + 1)]
    for piece in pieces:
        assert firsts[piece.home] <= piece.index < firsts[piece.home + 1]


@given(shares())
def test_at_home_the_order_of_the_sum_is_that_of_equal_shares(given: tuple[int, ...]) -> None:
    """A rank computes its first ones, adds what comes, and its last one is the last."""
    work = work_of(given)
    for rank, mine in enumerate(work):
        own = [piece.index for piece in mine if piece.home == rank]
        away = sorted(p.index for pieces in work for p in pieces if p.home == rank) if own else []
        away = [index for index in away if index not in own]
        assert [*own[:-1], *away, own[-1]] == sorted([*own, *away])
        assert all(p.home != rank for p in mine[: len(mine) - len(own)])


@given(st.integers(1, 8), st.integers(0, 40))
def test_equal_shares_move_nothing(ranks: int, more: int) -> None:
    total = LEAST_SHARE * ranks + more
    for rank, mine in enumerate(work_of(equal_shares(total, ranks))):
        assert all(piece.home == rank for piece in mine)
