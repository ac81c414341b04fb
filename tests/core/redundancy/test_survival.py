"""Survival: counted exactly, compared with trying every subset; and the question which nodes can be
lost now."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations
from math import comb, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.redundancy.placement import place
from keepstep.core.redundancy.survival import (
    out_of_reach,
    survivable_counts,
    survival,
    survival_at,
    which_can_be_lost,
)
from keepstep.errors import ConfigError
from keepstep.model.topology import (
    Copies,
    Group,
    NoRedundancy,
    Parity,
    Placement,
    ReedSolomon,
    Scheme,
    topology,
)

POLICIES: list[Scheme] = [
    NoRedundancy(),
    *map(Copies, (2, 3, 4)),
    *map(Parity, (2, 3, 4, 5)),
    ReedSolomon(4, 2),
    ReedSolomon(2, 2),
]


def survives(placement: Placement, lost: set[int]) -> bool:
    """Asked of the holders alone: every lost node's snapshot has enough of them left."""
    for group in placement.groups:
        for owner in lost & set(group.members):
            left = [node for node in group.holders(owner) if node not in lost]
            if len(left) < len(group.holders(owner)) - group.tolerates:
                return False
    return True


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("nodes", range(1, 13))
def test_counts_equal_trying_every_subset(policy: Scheme, nodes: int) -> None:
    try:
        placement = place(policy, topology(nodes))
    except ConfigError:
        return
    counted = survivable_counts(placement.groups, nodes)
    tried = [
        sum(survives(placement, set(lost)) for lost in combinations(range(nodes), k))
        for k in range(nodes + 1)
    ]
    assert counted == tried
    assert survival(placement.groups, nodes) == {
        k: Fraction(tried[k], comb(nodes, k)) for k in range(1, nodes + 1)
    }


@pytest.mark.parametrize("m", [2, 3, 4])
@pytest.mark.parametrize("size", range(5, 14))
def test_rings_of_every_size_equal_trying_every_subset(size: int, m: int) -> None:
    ring = Group(tuple(range(size)), m - 1, ring=True)
    runs = [{(start + i) % size for i in range(m)} for start in range(size)]
    tried = [
        sum(not any(run <= set(lost) for run in runs) for lost in combinations(range(size), k))
        for k in range(size + 1)
    ]
    assert survivable_counts([ring], size) == tried


def test_thousands_of_nodes_are_counted_exactly() -> None:
    groups = place(Copies(2), topology(2001)).groups
    chances = survival(groups, 40)
    pairs_fatal = 2001 - (2001 // 2 - 1)  # as many as there are distinct sets of holders
    assert chances[2] == 1 - Fraction(pairs_fatal, comb(2001, 2))
    assert all(chances[k] > chances[k + 1] for k in range(1, 40))


@given(st.sampled_from(POLICIES), st.integers(6, 14), st.floats(0, 1))
def test_the_chance_over_a_window_is_the_counts_weighted(
    policy: Scheme, nodes: int, keep: float
) -> None:
    groups = place(policy, topology(nodes)).groups
    weighted = sum(
        count * keep ** (nodes - k) * (1 - keep) ** k
        for k, count in enumerate(survivable_counts(groups, nodes))
    )
    assert isclose(survival_at(groups, keep), weighted, rel_tol=1e-9, abs_tol=1e-12)


@given(st.sampled_from(POLICIES), st.integers(6, 9), st.integers(0, 1 << 30))
def test_which_can_be_lost_equals_trying_every_loss(policy: Scheme, nodes: int, seed: int) -> None:
    """From a random state of proof: some nodes dead, some parts not yet proven."""
    rng = random.Random(seed)
    placement = place(policy, topology(nodes))
    alive = {node for node in range(nodes) if rng.random() < 0.9}
    proven = {
        owner: {node for node in holders if rng.random() < 0.9}
        for owner, holders in placement.holders.items()
    }
    here = {owner: have & alive for owner, have in proven.items()}
    answer = which_can_be_lost(placement, alive, proven)
    already = out_of_reach(placement, here)
    assert answer.out_of_reach == already
    for node in alive:
        taken = set(out_of_reach(placement, here, {node})) - set(already)
        assert set(answer.critical.get(node, ())) == taken
        assert (node in answer.safe) == (not taken)
    if already:
        assert answer.any_nodes == -1
    else:
        fatal = [
            k
            for k in range(1, len(alive) + 1)
            for lost in combinations(alive, k)
            if out_of_reach(placement, here, lost)
        ]
        assert answer.any_nodes == min(fatal, default=len(alive) + 1) - 1


def test_the_answer_is_a_sentence() -> None:
    placement = place(Copies(2), topology(4))
    everything = placement.holders
    assert (
        which_can_be_lost(placement, range(4), everything).why == "any one of 4 nodes may be lost"
    )
    unproven = {**everything, 2: (2,)}
    assert which_can_be_lost(placement, range(4), unproven).why == (
        "node 2 must stay (with node 2 would go the snapshots of node 2); safe to lose: "
        "nodes 0, 1, 3"
    )
    assert which_can_be_lost(placement, (0, 1, 3), everything).why.startswith(
        "node 3 must stay (with node 3 would go the snapshots of nodes 2, 3)"
    )
    assert which_can_be_lost(placement, (0, 1), everything).why.startswith(
        "memory no longer has the snapshots of nodes 2, 3"
    )
    assert (
        which_can_be_lost(
            place(Copies(3), topology(6)), range(6), place(Copies(3), topology(6)).holders
        ).any_nodes
        == 2
    )
