"""Shares: every shared block is kept by one of its replicas, shares are equal within one block, and
what differs, or only looks equal for the moment, is nobody's replica."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.redundancy.shares import RankBlocks, SharePlan, plan_of, plans, resolved
from keepstep.core.resume.cut import Holding, agree, cut, hopeless
from keepstep.model.layout import Layout, Shard, TensorSpec, lay_out
from keepstep.model.shares import Share, bits_of, blocks_of, runs_of
from keepstep.model.snapshot import Stamp

BLOCK = 64


def state(*tensors: tuple[str, int], shard: Shard | None = None) -> Layout:
    """Of tensors with so many blocks each."""
    return lay_out(
        [
            TensorSpec(name, "uint8", (blocks * BLOCK,), blocks * BLOCK, shard=shard)
            for name, blocks in tensors
        ]
    )


def blocks(
    rank: int, sums: list[int], layout: Layout | None = None, still: frozenset[int] | None = None
) -> RankBlocks:
    layout = layout or state(("w", len(sums)))
    return RankBlocks(rank, layout, BLOCK, sums, still or frozenset(range(len(sums))))


# -- REFT, acceptance list 1: shard bytes = S/n +- one block


@given(ranks=st.integers(2, 8), count=st.integers(1, 60))
def test_reft_1_each_replica_keeps_its_part_within_one_block(ranks: int, count: int) -> None:
    told = [blocks(rank, list(range(count))) for rank in range(ranks)]
    [plan] = plans(told)
    assert plan.members == tuple(range(ranks)) and plan.blocks == tuple(range(count))
    kept = [plan.kept_by(rank) for rank in plan.members]
    assert frozenset().union(*kept) == frozenset(plan.blocks)
    assert sum(map(len, kept)) == count, "no block is kept twice"
    assert all(abs(len(share) - count / ranks) < 1 for share in kept)
    assert all(len(runs_of(share)) <= 1 for share in kept), "one run each"
    for rank in plan.members:
        assert plan.lacked_by(rank) == frozenset(plan.blocks) - plan.kept_by(rank)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=6, max_size=6), st.sets(st.integers(0, 5))),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([(6,), (1, 5), (2, 2, 2), (1, 1, 1, 1, 1, 1)]),
)
def test_whatever_is_told_a_shared_block_is_equal_everywhere_and_may_be_shared(
    drawn: list[tuple[list[int], set[int]]], sizes: tuple[int, ...]
) -> None:
    layout = state(*((f"t{number}", size) for number, size in enumerate(sizes)))
    told = [
        RankBlocks(rank, layout, BLOCK, sums, frozenset(still))
        for rank, (sums, still) in enumerate(drawn)
    ]
    made = plans(told)
    members = [rank for plan in made for rank in plan.members]
    assert len(members) == len(set(members)), "a rank is in one class at most"
    for plan in made:
        assert len(plan.members) > 1 and plan.blocks
        for block in plan.blocks:
            assert all(block in told[rank].still for rank in plan.members)
            assert len({told[rank].sums[block] for rank in plan.members}) == 1
    assert plans(list(reversed(told))) == made, "the order in which they are told is nothing"
    for rank in range(len(told)):
        assert plan_of(rank, told) == next((p for p in made if rank in p.members), None)


def test_hsdp_shares_among_those_that_hold_the_same_shard() -> None:
    layouts = [state(("w", 4), shard=Shard((8 * BLOCK,), (at * 4 * BLOCK,))) for at in range(2)]
    told = [
        blocks(rank, [10 * (rank % 2) + b for b in range(4)], layouts[rank % 2])
        for rank in range(4)
    ]
    made = plans(told)
    assert [plan.members for plan in made] == [(0, 2), (1, 3)]
    assert all(len(plan.kept_by(rank)) == 2 for plan in made for rank in plan.members)


def test_equal_bytes_of_different_shards_are_not_shared() -> None:
    """Moments that are all zeros in the beginning."""
    layouts = [state(("w", 4), shard=Shard((8 * BLOCK,), (at * 4 * BLOCK,))) for at in range(2)]
    assert plans([blocks(rank, [7] * 4, layouts[rank]) for rank in range(2)]) == []


def test_what_fsdp_replicates_is_shared_beside_shards() -> None:
    told = []
    for rank in range(4):
        shard = TensorSpec(
            "w", "uint8", (2 * BLOCK,), 2 * BLOCK, None, Shard((8 * BLOCK,), (rank * 2 * BLOCK,))
        )
        norm = TensorSpec("norm", "uint8", (4 * BLOCK,), 4 * BLOCK)
        told.append(blocks(rank, [rank, 10 + rank, 1, 2, 3, 4], lay_out([shard, norm])))
    [plan] = plans(told)
    assert plan.members == (0, 1, 2, 3) and plan.blocks == (2, 3, 4, 5)


def test_a_tensor_that_differs_anywhere_is_no_replica() -> None:
    """Shards of which nothing says so (FSDP1's flat parameters): blocks of zeros are equal for the
    moment only."""
    layout = state(("flat", 4), ("scale", 2))
    told = [blocks(rank, [10 + rank, 0, 0, 0, 5, 6], layout) for rank in range(2)]
    [plan] = plans(told)
    assert plan.blocks == (4, 5), "of the flat tensor nothing"


def test_one_replica_that_has_gone_astray_keeps_its_own() -> None:
    told = [blocks(rank, [1, 2, 3, 4]) for rank in range(4)]
    told[3] = replace(told[3], sums=[1, 2, 30, 4])
    [plan] = plans(told)
    assert plan.members == (0, 1, 2)


def test_a_rank_that_copies_a_tensor_at_the_boundary_shares_all_the_others() -> None:
    layout = state(("a", 2), ("b", 8))
    told = [blocks(rank, list(range(10)), layout) for rank in range(4)]
    told[0] = replace(told[0], still=frozenset(range(2, 10)))
    [plan] = plans(told)
    assert plan.members == (0, 1, 2, 3) and plan.blocks == tuple(range(2, 10))


def test_what_an_optimizer_does_not_own_is_never_shared() -> None:
    told = [blocks(rank, [1, 2, 3, 4], still=frozenset({1, 3})) for rank in range(2)]
    [plan] = plans(told)
    assert plan.blocks == (1, 3)


def test_a_digest_in_a_table_gives_way_to_the_keeper_s_checksum() -> None:
    """What never left a device has no checksum of its rank's own."""
    share = Share(7, 2)
    first = replace(blocks(0, [1, 2, 903, 904]), lacking=frozenset({2, 3}), share=share)
    second = replace(blocks(1, [801, 802, 3, 4]), lacking=frozenset({0, 1}), share=share)
    found = resolved([first, second])
    assert found is not None
    assert [list(one.sums) for one in found] == [[1, 2, 3, 4]] * 2
    assert plans(found)[0].blocks == (0, 1, 2, 3)
    assert resolved([first, replace(second, share=Share(8, 2))]) is None, "they are not equal"
    assert resolved([first]) is None, "nobody keeps it"


def test_a_checksum_in_a_table_needs_no_share_but_is_looked_for() -> None:
    first = replace(blocks(0, [1, 2]), lacking=frozenset({1}))
    assert resolved([first, blocks(1, [1, 2])]) is not None
    assert resolved([first, blocks(1, [1, 3])]) is None


def test_plans_are_told_apart() -> None:
    one, other = SharePlan((0, 1), (0, 1), BLOCK), SharePlan((0, 2), (0, 1), BLOCK)
    assert one.number == SharePlan((0, 1), (0, 1), BLOCK).number != other.number
    assert one.share([5, 6], True) == SharePlan((0, 1), (0, 1), BLOCK).share([5, 6], True)
    assert one.share([5, 6], True).digest != other.share([5, 6], True).digest
    assert one.share([5, 6], True).digest != one.share([6, 5], True).digest
    assert one.share([5, 6, 9], True) == one.share([5, 6, 10], True), (
        "what is not shared is nothing"
    )
    assert one.share([5, 6], True).ranks == 2 and one.share([5, 6], False).ranks == 0
    assert one.differing([5, 6], [5, 7]) == [1] and one.differing([5, 6], [5]) == [1]


# -- what is shared counts when all tell the same

AT = Stamp(5, 1)


def holding(share: Share | None, *stamps: int) -> Holding:
    sealed = frozenset({Stamp(step, 1) for step in (*stamps, 5)})
    return Holding(sealed, None, 5, shares=() if share is None else ((AT, share),))


@pytest.mark.parametrize(
    ("shares", "agrees"),
    [
        ([None, None], True),
        ([Share(7, 2), Share(7, 2)], True),
        ([Share(7, 2), Share(8, 2)], False),
        ([Share(7, 2), Share(7, 0)], True),  # keeps all, and tells the same
        ([Share(7, 2), Share(8, 0)], False),
        ([Share(7, 2), None], False),
        ([Share(7, 0), Share(8, 0)], True),  # nobody depends on anybody
        ([Share(7, 2), Share(7, 2), Share(9, 2), Share(9, 2)], True),  # two classes
        ([Share(7, 2), Share(9, 2), Share(9, 2), Share(7, 2)], True),
        ([Share(7, 2), Share(7, 2), Share(9, 2), Share(7, 2)], False),
        ([Share(7, 3), Share(7, 3), Share(7, 3), None], True),
    ],
)
def test_a_stamp_at_which_replicas_differ_is_no_cut_and_hopeless(
    shares: list[Share | None], agrees: bool
) -> None:
    held = [holding(share, 4) for share in shares]
    assert agree(AT, held) is agrees
    assert cut(held, len(held)) == (AT if agrees else Stamp(4, 1))
    assert hopeless(AT, held, len(held)) is not agrees
    assert not hopeless(AT, held[:-1], len(held)), "as long as one has not told"


@given(st.sets(st.integers(0, 300)))
def test_bitmaps_and_runs_come_back(chosen: set[int]) -> None:
    assert blocks_of(bits_of(chosen)) == chosen
    assert bits_of(chosen)[-1:] != b"\0"
    runs = runs_of(chosen)
    assert [b for first, count in runs for b in range(first, first + count)] == sorted(chosen)
    assert len(runs) == sum(block - 1 not in chosen for block in chosen)
