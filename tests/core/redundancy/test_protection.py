"""Every rank has the right holders and stripe group, whatever the policy, the nodes, the racks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keepstep.core.redundancy.placement import place
from keepstep.core.redundancy.protection import Assignment, assignments
from keepstep.errors import ConfigError
from keepstep.model.mesh import Member, Mesh
from keepstep.model.topology import Copies, NoRedundancy, Parity, ReedSolomon, Scheme

SCHEMES = st.one_of(
    st.just(NoRedundancy()),
    st.builds(Copies, st.integers(2, 4)),
    st.builds(Parity, st.integers(2, 5)),
    st.builds(ReedSolomon, st.integers(1, 4), st.integers(1, 3)),
)


def mesh(ranks: list[int], racks: list[str] | None = None) -> Mesh:
    members = [
        Member(node, "", 0, 1, count, racks[node] if racks else None)
        for node, count in enumerate(ranks)
    ]
    return Mesh(1, 0, tuple(members), "")


def found(policy: Scheme, over: Mesh) -> dict[int, Assignment]:
    """Assignments of a mesh that this policy fits."""
    try:
        return assignments(policy, over)
    except ConfigError:
        assume(False)
        raise


@given(SCHEMES, st.integers(2, 12), st.integers(1, 4))
def test_every_rank_has_one_assignment_on_its_own_node_and_holders_on_others(
    policy: Scheme, nodes: int, ranks_per_node: int
) -> None:
    over = mesh([ranks_per_node] * nodes)
    by_rank = found(policy, over)
    assert list(by_rank) == list(range(over.world_size))
    for rank, assignment in by_rank.items():
        assert (assignment.rank, assignment.node) == (rank, over.node_of[rank])
        assert assignment.node not in assignment.holders and len(set(assignment.holders)) == len(
            assignment.holders
        )


@given(st.builds(Copies, st.integers(2, 4)), st.lists(st.integers(1, 4), min_size=2, max_size=12))
def test_copies_go_where_the_placement_says_and_nodes_may_have_unequal_ranks(
    policy: Copies, ranks: list[int]
) -> None:
    over = mesh(ranks)
    holders = place(policy, over.topology).holders if len(ranks) >= policy.m else assume(False)
    for assignment in found(policy, over).values():
        assert (assignment.node, *assignment.holders) == holders[assignment.node] and len(
            assignment.holders
        ) == policy.m - 1
        assert assignment.stripe_group == () and assignment.tolerates == 0


@given(
    st.one_of(
        st.builds(Parity, st.integers(2, 5)),
        st.builds(ReedSolomon, st.integers(1, 4), st.integers(1, 3)),
    ),
    st.data(),
)
def test_rows_take_one_rank_of_every_node_of_a_group(policy: Scheme, data: st.DataObject) -> None:
    over = mesh([data.draw(st.integers(1, 4))] * data.draw(st.integers(2, 12)))
    by_rank = found(policy, over)
    groups = {
        member: group for group in place(policy, over.topology).groups for member in group.members
    }
    for rank, assignment in by_rank.items():
        group = groups[assignment.node]
        assert rank in assignment.stripe_group and {
            by_rank[r].stripe_group for r in assignment.stripe_group
        } == {assignment.stripe_group}, "a row's members agree about it"
        assert tuple(over.node_of[r] for r in assignment.stripe_group) == group.members
        assert (
            set(assignment.holders) == set(group.members) - {assignment.node}
            and assignment.tolerates == group.tolerates
        )
        assert (
            len({r - over.ranks_of(over.node_of[r]).start for r in assignment.stripe_group}) == 1
        ), "the i-th ranks of their nodes"


@given(
    st.one_of(st.builds(Copies, st.integers(2, 4)), st.builds(Parity, st.integers(2, 5))),
    st.lists(st.integers(1, 4), min_size=2, max_size=6),
)
def test_no_two_parts_of_a_rank_lie_in_one_rack(policy: Scheme, sizes: list[int]) -> None:
    racks = [f"rack-{rack}" for rack, size in enumerate(sizes) for _ in range(size)]
    for assignment in found(policy, mesh([2] * len(racks), racks)).values():
        parts = [racks[node] for node in (assignment.node, *assignment.holders)]
        assert len(set(parts)) == len(parts)


@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_a_lost_rack_takes_no_more_of_a_row_than_it_tolerates(
    k: int, m: int, sizes: list[int]
) -> None:
    racks = [f"rack-{rack}" for rack, size in enumerate(sizes) for _ in range(size)]
    over = mesh([1] * len(racks), racks)
    for assignment in found(ReedSolomon(k, m), over).values():
        assert (
            max(Counter(racks[over.node_of[r]] for r in assignment.stripe_group).values())
            <= assignment.tolerates
        )


def test_two_nodes_of_two_ranks() -> None:
    over = mesh([2, 2])
    assert assignments(Copies(2), over)[1] == Assignment(1, 0, (1,))
    assert assignments(Parity(2), over)[1] == Assignment(1, 0, (1,), (1, 3), 1)
    assert assignments(NoRedundancy(), over)[1] == Assignment(1, 0, ())


def test_a_ring_of_three() -> None:
    assert {
        rank: assignment.holders
        for rank, assignment in assignments(Copies(2), mesh([1, 1, 1])).items()
    } == {
        0: (1,),
        1: (2,),
        2: (0,),
    }


def test_one_node_alone_has_nobody_to_hold_for_it() -> None:
    for policy in (Copies(2), Parity(4), ReedSolomon(4, 2)):
        assert assignments(policy, mesh([3])) == {
            rank: Assignment(rank, 0, ()) for rank in range(3)
        }


def test_too_few_nodes_and_unequal_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="copies:3: expected at least 3 nodes, found 2"):
        assignments(Copies(3), mesh([1, 1]))
    with pytest.raises(
        ConfigError,
        match=r"parity:2: expected the same number of ranks on every node, found \[1, 2\]",
    ):
        assignments(Parity(2), mesh([1, 2]))


def test_a_row_is_cut_by_its_largest_member() -> None:
    assignment = assignments(Parity(3), mesh([1, 1, 1]))[0]
    stripes = assignment.stripes({0: 1000, 1: 0, 2: 70}, checked_bytes=4096)
    assert (stripes.members, stripes.data_bytes, stripes.tolerates) == ((0, 1, 2), (1000, 0, 70), 1)
    assert stripes.block_bytes * stripes.k >= 1000
