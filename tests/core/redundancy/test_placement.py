"""Placement: everybody in one group, racks kept apart whenever that is possible, and a choice that
says why."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.redundancy.placement import Facts, auto, place
from keepstep.core.redundancy.survival import out_of_reach, survival_at
from keepstep.errors import ConfigError
from keepstep.model.topology import (
    Copies,
    NoRedundancy,
    Parity,
    Placement,
    ReedSolomon,
    Scheme,
    topology,
)
from keepstep.model.units import GIB

schemes = st.one_of(
    st.builds(Copies, st.integers(2, 4)),
    st.builds(Parity, st.integers(2, 6)),
    st.builds(ReedSolomon, st.integers(1, 5), st.integers(1, 3)),
)
rack_lists = st.lists(st.integers(1, 5), min_size=1, max_size=8)  # nodes in each rack


def named(sizes: list[int]) -> list[str]:
    return [f"rack-{rack}" for rack, size in enumerate(sizes) for _ in range(size)]


def proven(placement: Placement) -> dict[int, tuple[int, ...]]:
    return placement.holders


@given(schemes, st.integers(1, 60))
def test_every_node_is_in_one_group_and_any_tolerated_loss_is_survived(
    policy: Scheme, nodes: int
) -> None:
    try:
        placement = place(policy, topology(nodes))
    except ConfigError as error:
        assert f"found {nodes}" in str(error)
        return
    assert sorted(member for group in placement.groups for member in group.members) == list(
        range(nodes)
    )
    assert all(holders[0] == node for node, holders in placement.holders.items())
    for group in placement.groups:
        assert out_of_reach(placement, proven(placement), group.members[: group.tolerates]) == ()
    assert placement.why


@given(
    st.one_of(
        st.builds(Parity, st.integers(2, 9)),
        st.builds(ReedSolomon, st.integers(1, 6), st.integers(1, 3)),
    ),
    st.integers(2, 200),
)
def test_coded_groups_differ_by_one_and_are_never_too_small(policy: Scheme, nodes: int) -> None:
    size = policy.n if isinstance(policy, Parity) else policy.k + policy.m  # type: ignore[union-attr]
    if nodes < size:
        return
    sizes = [len(group.members) for group in place(policy, topology(nodes)).groups]
    assert max(sizes) - min(sizes) <= 1
    assert all(
        found > group.tolerates
        for found, group in zip(sizes, place(policy, topology(nodes)).groups, strict=True)
    )
    assert nodes % size or set(sizes) == {size}


@given(schemes, rack_lists)
def test_a_lost_rack_loses_no_snapshot(policy: Scheme, sizes: list[int]) -> None:
    where = topology(sum(sizes), named(sizes))
    try:
        placement = place(policy, where)
    except ConfigError as error:
        assert "expected" in str(error) and "found" in str(error)
        return
    for members in where.racks.values():
        assert out_of_reach(placement, proven(placement), members) == ()


@given(
    st.one_of(st.builds(Copies, st.integers(2, 4)), st.builds(Parity, st.integers(2, 5))),
    rack_lists,
)
def test_no_two_holders_of_a_snapshot_share_a_rack(policy: Scheme, sizes: list[int]) -> None:
    racks = named(sizes)
    try:
        placement = place(policy, topology(len(racks), racks))
    except ConfigError:
        return
    for holders in placement.holders.values():
        assert len({racks[node] for node in holders}) == len(holders)


def can_be_kept_apart(racks: Counter[str], groups: tuple[int, ...]) -> bool:
    """By trying every choice of racks for every group."""
    if not groups:
        return True
    there = [rack for rack, left in racks.items() if left]
    return any(
        can_be_kept_apart(racks - Counter(chosen), groups[1:])
        for chosen in combinations(there, groups[0])
    )


@given(st.integers(2, 4), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_racks_are_refused_only_when_no_choice_works(m: int, sizes: list[int]) -> None:
    racks = named(sizes)
    count = len(racks)
    if count < m:
        return
    wanted = [m] * (count // m)
    wanted[-1] += count % m
    possible = can_be_kept_apart(Counter(racks), tuple(wanted))
    if possible:
        place(Copies(m), topology(count, racks))
    else:
        with pytest.raises(
            ConfigError,
            match=rf"copies:{m}: expected racks .* found {len(sizes)} racks: rack-0 of {sizes[0]}",
        ):
            place(Copies(m), topology(count, racks))


def test_reed_solomon_shares_racks_only_when_it_must() -> None:
    six = place(ReedSolomon(4, 2), topology(12, named([2] * 6)))
    assert all(len({member // 2 for member in group.members}) == 6 for group in six.groups)
    uneven = place(ReedSolomon(1, 2), topology(6, named([2, 1, 1, 1, 1])))
    assert all(len({0, 1} & set(group.members)) == 1 for group in uneven.groups)
    three = place(ReedSolomon(4, 2), topology(6, named([2] * 3)))
    assert (
        three.groups[0].members == (0, 1, 2, 3, 4, 5)
        and "at most 2 of a group share a rack" in three.why
    )
    with pytest.raises(ConfigError, match="at most 2 nodes of a rack in a group"):
        place(ReedSolomon(4, 2), topology(6, named([3, 3])))


@pytest.mark.parametrize(
    ("policy", "nodes", "ratio"),
    [
        (NoRedundancy(), 4, 1.0),
        *((Copies(2), 16, 2.0), (Copies(3), 16, 3.0), (Copies(2), 5, 2.0)),
        *((Parity(2), 8, 2.0), (Parity(4), 16, 4 / 3), (Parity(8), 16, 8 / 7)),
        *((ReedSolomon(4, 2), 6, 1.5), (ReedSolomon(8, 2), 10, 1.25)),
    ],
)
def test_memory_is_the_formula(policy: Scheme, nodes: int, ratio: float) -> None:
    placement = place(policy, topology(nodes))
    assert placement.bytes_per_node_ratio == pytest.approx(ratio)
    assert placement.two_slots_ratio == pytest.approx(2 * ratio)


def facts(
    nodes: int,
    free: float,
    snapshot: float = 1.0,
    rate: float = 1e-4,
    racks: list[str] | None = None,
) -> Facts:
    return Facts(topology(nodes, racks), int(free * GIB), int(snapshot * GIB), rate)


def test_auto_prefers_copies_and_says_the_numbers() -> None:
    policy, why = auto(facts(16, free=8))
    assert policy == Copies(2)
    assert why.startswith(
        "copies:2: 4.0 GiB a node of 8.0 GiB free, and with 16 nodes that each fail 0.0001 "
        "times an hour"
    )


@pytest.mark.parametrize(
    ("free", "expected", "refusal"),
    [
        (3.5, Parity(3), "copies:2 needs 4.0 GiB a node of 3.5 GiB free"),
        (2.9, Parity(4), "parity:3 needs 3.0 GiB"),
        (2.5, Parity(8), "parity:4 needs 2.7 GiB"),
        (2.2, NoRedundancy(), "rs:8+2 needs"),
    ],
)
def test_auto_takes_parity_when_memory_is_short(
    free: float, expected: Scheme, refusal: str
) -> None:
    policy, why = auto(facts(24, free=free))
    assert policy == expected and refusal in why


def test_auto_takes_more_when_nodes_fail_often() -> None:
    policy, why = auto(facts(1024, free=20, rate=0.01))
    assert policy == Copies(3) and "copies:2 would fall back to the store every" in why
    policy, why = auto(facts(1024, free=20, rate=1.0))
    assert policy == Copies(3) and "the safest that fits" in why


@given(st.integers(1, 40), st.floats(0.5, 20), st.floats(0, 2))
def test_auto_never_chooses_what_does_not_fit_and_never_a_less_safe_one_without_reason(
    nodes: int, free: float, rate: float
) -> None:
    policy, why = auto(facts(nodes, free=free, rate=rate))
    placement = place(policy, topology(nodes))
    assert policy == NoRedundancy() or placement.two_slots_ratio <= free
    if "the safest that fits" in why and free > 8:
        assert survival_at(placement.groups, 0.9) >= survival_at(
            place(Copies(2), topology(nodes)).groups, 0.9
        )


def test_auto_with_one_node_or_one_rack_chooses_nothing_and_says_so() -> None:
    assert auto(facts(1, free=100))[0] == NoRedundancy()
    policy, why = auto(facts(4, free=100, racks=["a"] * 4))
    assert policy == NoRedundancy() and "a of 4" in why
