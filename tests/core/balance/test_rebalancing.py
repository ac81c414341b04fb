"""Shares follow what lasts, and nothing else; and all ranks say the same."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.balance.rebalancing import LOOK_STEPS, LOOKS, Rebalanced, Rebalancing

MS = 1_000_000
EVEN = (10 * MS,) * 4
SLOW = (10 * MS, 10 * MS, 20 * MS, 10 * MS)


def looks(sharing: Rebalancing, costs: tuple[int, ...], count: int) -> list[Rebalanced]:
    told = [sharing.look(costs, LOOK_STEPS * number) for number in range(count)]
    return [one for one in told if one is not None]


def test_a_rank_at_half_speed_is_relieved_two_looks_later() -> None:
    sharing = Rebalancing(28, 4)
    assert looks(sharing, EVEN, 5) == []
    assert sharing.look(SLOW, 40) is None
    changed = sharing.look(SLOW, 48)
    assert changed is not None and changed.shares == sharing.shares == (8, 8, 4, 8)
    assert (changed.before_ns, changed.after_ns, changed.even_ns) == (140 * MS, 80 * MS, 70 * MS)
    assert "rank 2 computes 4 instead of 7 (20.0 ms each)" in changed.why
    assert "80.0 ms a step instead of 140.0 ms" in changed.why and "14 % more" in changed.why


def test_and_has_as_many_as_the_others_again_when_it_is_as_fast() -> None:
    sharing = Rebalancing(28, 4)
    looks(sharing, SLOW, 4)
    assert sharing.shares == (8, 8, 4, 8)
    [changed] = looks(sharing, EVEN, 4)
    assert changed.shares == (7, 7, 7, 7)


def test_one_disturbed_look_moves_nothing() -> None:
    sharing = Rebalancing(28, 4)
    for _ in range(20):
        assert looks(sharing, EVEN, 3) == []
        assert sharing.look((10 * MS, 90 * MS, 10 * MS, 10 * MS), 0) is None
    assert sharing.shares == (7, 7, 7, 7)


def test_what_gains_little_moves_nothing() -> None:
    assert looks(Rebalancing(28, 4), (10 * MS, 10 * MS, 11 * MS, 10 * MS), 10) == []


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_noise_moves_nothing(noise: float) -> None:
    rng = random.Random(7)
    sharing = Rebalancing(28, 4)
    for number in range(2000):
        costs = tuple(int(10 * MS * rng.lognormvariate(0, noise)) for _ in range(4))
        assert sharing.look(costs, number) is None


@pytest.mark.parametrize("costs", [(0, 1, 1, 1), (-1, 1, 1, 1), (1, 1, 1), ()])
def test_what_nobody_knows_moves_nothing(costs: tuple[int, ...]) -> None:
    sharing = Rebalancing(28, 4)
    looks(sharing, SLOW, LOOKS - 1)
    assert costs == () or sharing.look(costs, 0) is None
    assert sharing.shares == (7, 7, 7, 7)


def test_too_few_are_never_moved() -> None:
    sharing = Rebalancing(7, 4)
    assert not sharing.can_change and looks(sharing, SLOW, 9) == []
    assert sharing.shares == (2, 2, 2, 1)


COSTS = st.lists(st.tuples(*[st.integers(1, 100)] * 3), min_size=1, max_size=20)


@given(COSTS, st.integers(0, 20))
def test_a_restored_one_goes_on_as_if_nothing_had_happened(
    costs: list[tuple[int, ...]], at: int
) -> None:
    undisturbed, before = Rebalancing(12, 3), Rebalancing(12, 3)
    for look in costs[:at]:
        before.look(look, 0)
    restored = Rebalancing(12, 3)
    assert restored.load_state_dict(json.loads(json.dumps(before.state_dict())))
    for look in costs[:at]:
        undisturbed.look(look, 0)
    for look in costs[at:]:
        assert restored.look(look, 0) == undisturbed.look(look, 0)
    assert restored.shares == undisturbed.shares and sum(restored.shares) == 12


def test_shares_of_another_job_are_not_taken() -> None:
    sharing = Rebalancing(28, 4)
    looks(sharing, SLOW, 4)
    for other in (Rebalancing(24, 4), Rebalancing(28, 7)):
        equal = other.shares
        assert not other.load_state_dict(sharing.state_dict()) and other.shares == equal
