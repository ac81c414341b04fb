"""Reach: exactly what can be decoded is within reach, never what mixes two stamps, and the reading
is spread."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.redundancy.stripes import StripeRegion, decode_plan, stripes_of_snapshots
from keepstep.core.resume.sources import restorable_stamps, restore_sources
from keepstep.model.restore_sources import HeldParity, Inventory, RestoreSource
from keepstep.model.snapshot import Stamp
from tests.core.parity_memory import carry_out, encoded

OLD, NEW = Stamp(4, 1), Stamp(5, 1)


def inventory(
    snapshots: set[tuple[int, Stamp]] | None = None, parities: set[HeldParity] | None = None
) -> Inventory:
    return Inventory(frozenset(snapshots or ()), frozenset(parities or ()))


def coded(rank: int, stamp: Stamp, size: int, tolerates: int = 1) -> HeldParity:
    return HeldParity(rank, stamp, tuple(range(size)), tolerates)


def member(
    rank: int, size: int, tolerates: int = 1, data: Stamp | None = NEW, parity: Stamp | None = NEW
) -> Inventory:
    """A node with one rank of a row: what it has of its data and of the row's parity."""
    return inventory(
        set() if data is None else {(rank, data)},
        set() if parity is None else {coded(rank, parity, size, tolerates)},
    )


def row_of(size: int, tolerates: int = 1, without: tuple[int, ...] = ()) -> dict[int, Inventory]:
    return {rank: member(rank, size, tolerates) for rank in range(size) if rank not in without}


# ----------------------------------------------------------------------------------------------
# copies


@given(
    st.dictionaries(
        st.integers(0, 5),
        st.frozensets(st.tuples(st.integers(0, 3), st.sampled_from([OLD, NEW])), max_size=6),
        max_size=5,
    )
)
def test_a_copy_anywhere_is_within_reach_and_nothing_else_is(
    held: dict[int, frozenset[tuple[int, Stamp]]],
) -> None:
    inventories = {node: Inventory(snapshots) for node, snapshots in held.items()}
    for rank in range(4):
        assert restorable_stamps(rank, inventories) == {
            stamp for snapshots in held.values() for r, stamp in snapshots if r == rank
        }
    for stamp in (OLD, NEW):
        found = restore_sources(range(4), stamp, inventories)
        assert set(found) == {
            rank for rank in range(4) if stamp in restorable_stamps(rank, inventories)
        }
        for rank, source in found.items():
            assert (
                sorted(source.copies)
                == sorted(node for node in held if (rank, stamp) in held[node])
                and not source.members
            )


def test_the_least_loaded_holder_comes_first() -> None:
    """Ranks 0 and 1 were lost; nodes 2 and 3 have both, node 4 one of them."""
    both = {(0, NEW), (1, NEW)}
    found = restore_sources(
        [0, 1], NEW, {2: inventory(both), 3: inventory(both), 4: inventory({(0, NEW)})}
    )
    assert found[0].copies == (2, 3, 4)
    assert found[1].copies == (2, 3)
    found = restore_sources([0, 1], NEW, {2: inventory(both), 3: inventory({(1, NEW)})})
    assert found == {0: RestoreSource(0, copies=(2,)), 1: RestoreSource(1, copies=(3, 2))}, (
        "node 2 is busy with rank 0"
    )


@given(st.lists(st.frozensets(st.integers(0, 4), min_size=1), min_size=1, max_size=12))
def test_every_copy_is_named_and_the_least_read_node_first(holders: list[frozenset[int]]) -> None:
    """Whoever holds a copy gives its share of it; so far each node gives what the ranks before have
    asked of it."""
    inventories = {
        node: inventory({(rank, NEW) for rank, nodes in enumerate(holders) if node in nodes})
        for node in range(5)
    }
    given_so_far = dict.fromkeys(range(5), 0.0)
    for rank, source in restore_sources(range(len(holders)), NEW, inventories).items():
        assert set(source.copies) == holders[rank]
        loads = [given_so_far[node] for node in source.copies]
        assert loads == sorted(loads)
        for node in source.copies:
            given_so_far[node] += 1 / len(source.copies)


# ----------------------------------------------------------------------------------------------
# codes


def decodable(rank: int, size: int, tolerates: int, data: set[int], parity: set[int]) -> bool:
    """By trying: every codeword with a block of this rank's data has enough blocks left."""
    stripes = stripes_of_snapshots(range(size), tolerates, [64 * size] * size)
    for codeword in range(size):
        pieces = [stripes.piece(codeword, index) for index in range(size)]
        left = sum(p.member in (data if p.region is StripeRegion.DATA else parity) for p in pieces)
        if pieces[rank].region is StripeRegion.DATA and left < stripes.k:
            return False
    return True


SHAPES = [(size, tolerates) for size in range(2, 7) for tolerates in range(1, min(size, 4))]


@pytest.mark.parametrize(("size", "tolerates"), SHAPES)
def test_after_any_loss_exactly_what_can_be_decoded_is_within_reach(
    size: int, tolerates: int
) -> None:
    for count in range(size):
        for lost in combinations(range(size), count):
            left = set(range(size)) - set(lost)
            inventories = row_of(size, tolerates, lost)
            for rank in range(size):
                expected = rank in left or decodable(rank, size, tolerates, left, left)
                assert (
                    (NEW in restorable_stamps(rank, inventories))
                    == expected
                    == (rank in left or count <= tolerates)
                )


@given(st.sampled_from(SHAPES), st.data())
def test_what_is_within_reach_can_be_decoded_whatever_the_nodes_have(
    shape: tuple[int, int], draw: st.DataObject
) -> None:
    """Data without parity, parity without data, nodes of other steps: it may err on the careful
    side only."""
    size, tolerates = shape
    some = st.lists(st.sampled_from([None, OLD, NEW]), min_size=size, max_size=size)
    data, parity = draw.draw(some), draw.draw(some)
    inventories = {
        rank: member(rank, size, tolerates, data[rank], parity[rank]) for rank in range(size)
    }
    for stamp in (OLD, NEW):
        have = [{rank for rank in range(size) if of[rank] == stamp} for of in (data, parity)]
        for rank in range(size):
            if stamp in restorable_stamps(rank, inventories):
                assert rank in have[0] or decodable(rank, size, tolerates, *have)


@given(st.sampled_from(SHAPES), st.integers(0, 1000))
def test_the_sources_named_give_the_bytes_back(shape: tuple[int, int], seed: int) -> None:
    size, tolerates = shape
    rng = random.Random(seed)
    stripes = stripes_of_snapshots(
        range(size), tolerates, [rng.randrange(2000) for _ in range(size)]
    )
    whole = encoded(stripes, seed)
    lost = sorted(rng.sample(range(size), rng.randint(1, tolerates)))
    found = restore_sources(lost, NEW, row_of(size, tolerates, tuple(lost)))
    assert list(found) == lost
    for rank, source in found.items():
        named = {r for r, _ in source.members}
        memory = {
            at: bytearray(part) if at[0] in named else bytearray(len(part))
            for at, part in whole.items()
        }
        missing = set(source.stripe_group) - named
        carry_out(decode_plan(stripes, missing, rank), stripes, memory)
        assert (
            memory[rank, StripeRegion.DATA] == whole[rank, StripeRegion.DATA]
            and memory[rank, StripeRegion.PARITY] == whole[rank, StripeRegion.PARITY]
        )


def test_data_and_parity_of_two_steps_are_never_mixed() -> None:
    """The write hole: node 1 was killed when its data was new and its parity still old."""
    torn = {0: member(0, 3), 1: member(1, 3, data=NEW, parity=OLD)}
    assert (
        restorable_stamps(2, torn) == frozenset()
        and restore_sources([2], NEW, torn) == restore_sources([2], OLD, torn) == {}
    )
    older = {node: inventory({(node, OLD), (node, NEW)}, {coded(node, OLD, 3)}) for node in (0, 1)}
    assert restorable_stamps(2, older) == {OLD}, "the slots before are whole"
    assert restore_sources([2], OLD, older) == {
        2: RestoreSource(2, stripe_group=(0, 1, 2), tolerates=1, members=((0, 0), (1, 1)))
    }


def test_rows_of_two_placements_are_never_mixed() -> None:
    """The same ranks in other rows: after nodes came or went, an older placement's parities may
    still lie there."""
    before, after = HeldParity(0, NEW, (0, 1, 2), 1), HeldParity(1, NEW, (0, 2, 1), 1)
    mixed = {0: inventory({(0, NEW)}, {before}), 1: inventory({(1, NEW)}, {after})}
    assert restorable_stamps(2, mixed) == frozenset()


def test_a_copy_is_preferred_to_decoding() -> None:
    inventories = row_of(3, without=(2,)) | {7: inventory({(2, NEW)})}
    assert restore_sources([2], NEW, inventories) == {2: RestoreSource(2, copies=(7,))}


def test_whoever_decodes_counts_as_busy() -> None:
    """Rank 2 is decoded from nodes 0 and 1; the copy of rank 9 is then taken from node 5 first."""
    inventories = row_of(3, without=(2,)) | {5: inventory({(9, NEW)})}
    inventories[0] = Inventory(inventories[0].snapshots | {(9, NEW)}, inventories[0].parities)
    assert restore_sources([9], NEW, inventories)[9].copies == (0, 5)
    assert restore_sources([2, 9], NEW, inventories)[9].copies == (5, 0)


def test_ranks_out_of_reach_are_left_out() -> None:
    assert restore_sources([0, 1], NEW, {3: inventory({(0, NEW), (1, OLD)})}) == {
        0: RestoreSource(0, copies=(3,))
    }
    assert restorable_stamps(0, {}) == frozenset()
