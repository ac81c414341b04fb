"""GEMINI (SOSP 2023, doi 10.1145/3600006.3613145): what a faithful implementation must reproduce,
one test a check.

Checks 1, 2, 13, 14, 15, 19 and 22 concern the placement, the commit protocol and what is recovered
from where. Here they are made in pure code: on the placement, on what every node has proven
(`core/resume/sources.py`, by trying every set of lost nodes) and on the protocol's model.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from math import ceil, comb

import pytest

from keepstep.core.redundancy import memory_budget
from keepstep.core.redundancy.placement import place
from keepstep.core.redundancy.protection import assignments
from keepstep.core.redundancy.survival import out_of_reach, survivable_counts, survival
from keepstep.core.resume.sources import restorable_stamps, restore_sources
from keepstep.core.resume.vote import Ballot, ListStore, Offer, Vote
from keepstep.errors import ConfigError, MemoryBudgetError
from keepstep.model.checkpoint import StoreListing
from keepstep.model.mesh import Member, Mesh
from keepstep.model.restore_sources import Inventory
from keepstep.model.snapshot import Stamp
from keepstep.model.topology import Copies, Group, Placement, topology
from keepstep.model.units import GIB
from tests.core.protocol_model import Protocol, World, sealed

STEP = Stamp(7, 1)


def placed(nodes: int, m: int) -> Placement:
    return place(Copies(m), topology(nodes))


def ring(nodes: int, m: int) -> Placement:
    """The alternative the paper compares with: every node sends to the next m - 1."""
    return Placement(
        Copies(m), (Group(tuple(range(nodes)), m - 1, ring=True),), "ring", "for comparison"
    )


def holder_sets(placement: Placement) -> set[frozenset[int]]:
    return {frozenset(holders) for holders in placement.holders.values()}


def recovered(placement: Placement, k: int) -> int:
    """How many of all sets of k lost nodes leave a holder of every checkpoint."""
    return sum(
        not out_of_reach(placement, placement.holders, lost)
        for lost in combinations(range(placement.nodes), k)
    )


def proven(placement: Placement, ranks_per_node: int = 1) -> dict[int, Inventory]:
    """What every node holds once the step is committed: its own ranks' snapshots, and those of the
    nodes it holds for."""
    ranks = {
        node: range(node * ranks_per_node, (node + 1) * ranks_per_node)
        for node in range(placement.nodes)
    }
    held = {
        node: {owner for owner, holders in placement.holders.items() if node in holders}
        for node in ranks
    }
    return {
        node: Inventory(frozenset((rank, STEP) for owner in held[node] for rank in ranks[owner]))
        for node in ranks
    }


def fetched(placement: Placement, k: int) -> int:
    """How many of all sets of k lost nodes leave every rank's snapshot within reach of the others'
    inventories."""
    everything = proven(placement)
    survived = 0
    for lost in combinations(range(placement.nodes), k):
        left = {node: found for node, found in everything.items() if node not in lost}
        # Whoever is left has its own: only the lost ones' must be found.
        survived += all(STEP in restorable_stamps(rank, left) for rank in lost)
    return survived


def after(lost: set[int], inventories: dict[int, Inventory]) -> dict[int, Inventory]:
    return {node: found for node, found in inventories.items() if node not in lost}


# m = 1 keeps nothing but the own copy: that policy is called `none`
@pytest.mark.parametrize("m", [2, 3, 4])
def test_check_01_placement_is_algorithm_1(m: int) -> None:
    for nodes in range(m, 33):
        g, r = divmod(nodes, m)
        placement = placed(nodes, m)
        cliques = [tuple(range(m * i, m * i + m)) for i in range(g if r == 0 else g - 1)]
        last = tuple(range(m * (g - 1), nodes))
        assert [group.members for group in placement.groups] == [*cliques, *([last] if r else [])]
        assert placement.strategy == ("mixed" if r else "group")
        for clique in cliques:
            assert all(set(placement.holders[node]) == set(clique) for node in clique)
        if r:
            around = last + last
            assert all(placement.holders[node] == around[i : i + m] for i, node in enumerate(last))
        received = [node for holders in placement.holders.values() for node in holders[1:]]
        # everybody sends and receives the same
        assert all(received.count(node) == m - 1 for node in range(nodes))


@pytest.mark.parametrize("m", [2, 3, 4])
def test_check_01_number_of_distinct_sets_and_distance_from_the_bound(m: int) -> None:
    for nodes in range(m, 33):
        g, r = divmod(nodes, m)
        sets = holder_sets(placed(nodes, m))
        assert len(sets) == (g if r == 0 else nodes - (m - 1) * (g - 1))
        best = 1 - Fraction(ceil(nodes / m), comb(nodes, m))
        gap = best - survival(placed(nodes, m).groups, m)[m]
        assert gap == (0 if r == 0 else Fraction(r + m - 2, comb(nodes, m)))


def test_check_01_the_example_of_figure_3c() -> None:
    assert placed(5, 2).holders == {0: (0, 1), 1: (1, 0), 2: (2, 3), 3: (3, 4), 4: (4, 2)}


def test_check_01_fewer_nodes_than_copies_are_refused() -> None:
    with pytest.raises(ConfigError, match="copies:3: expected at least 3 nodes, found 2"):
        placed(2, 3)


def test_check_02_every_single_loss_is_recovered() -> None:
    for nodes in range(2, 33):
        assert recovered(placed(nodes, 2), 1) == nodes


def test_check_02_of_120_pairs_exactly_112_are_recovered() -> None:
    assert recovered(placed(16, 2), 2) == 112


def test_check_02_of_560_triples_exactly_448_are_recovered() -> None:
    assert recovered(placed(16, 2), 3) == 448 and survival(placed(16, 2).groups, 3)[3] == Fraction(
        4, 5
    )


def test_check_02_a_ring_recovers_352_of_560_triples_not_60_percent() -> None:
    """The paper's 0.60 is the union bound; counted, it is 0.6286."""
    found = recovered(ring(16, 2), 3)
    assert found == 352 and float(survival(ring(16, 2).groups, 3)[3]) == pytest.approx(
        0.629, abs=5e-4
    )
    assert 1 - Fraction(16 * comb(14, 1), comb(16, 3)) == Fraction(3, 5)


def test_check_02_the_same_from_what_the_nodes_have_proven() -> None:
    """All 16 nodes, 120 pairs and 560 triples, by looking for every lost snapshot in the
    inventories of the nodes that are left."""
    assert [fetched(placed(16, 2), k) for k in (1, 2, 3)] == [16, 112, 448]
    assert [fetched(ring(16, 2), k) for k in (1, 2, 3)] == [16, 104, 352]


GROUP = [16, 112, 448, 1120, 1792, 1792, 1024, 256]
RING = [16, 104, 352, 660, 672, 336, 64, 2]


@pytest.mark.parametrize("k", range(1, 9))
def test_check_02_the_whole_row_for_16_nodes(k: int) -> None:
    assert survivable_counts(placed(16, 2).groups, k)[k] == GROUP[k - 1]
    assert survivable_counts(ring(16, 2).groups, k)[k] == RING[k - 1]
    if k <= 4:  # beyond, trying every set takes long and proves the same
        assert (recovered(placed(16, 2), k), recovered(ring(16, 2), k)) == (
            GROUP[k - 1],
            RING[k - 1],
        )


@pytest.mark.parametrize("nodes", range(4, 33, 4))
@pytest.mark.parametrize("m", [2, 4])
def test_check_02_corollary_1_is_a_lower_bound_and_exact_below_2m(nodes: int, m: int) -> None:
    for k, exact in survival(placed(nodes, m).groups, nodes).items():
        bound = (
            max(Fraction(0), 1 - Fraction(nodes * comb(nodes - m, k - m), m * comb(nodes, k)))
            if k >= m
            else Fraction(1)
        )
        assert exact >= bound and (k >= 2 * m or exact == bound)


@pytest.mark.parametrize(
    ("nodes", "m", "best", "mixed", "full_ring"),
    [
        (5, 2, 0.7000, 0.6000, 0.5000),
        (17, 2, 0.9338, 0.9265, 0.8750),
        (7, 3, 0.9143, 0.8571, 0.8000),
        (10, 3, 0.9667, 0.9500, 0.9167),
        (11, 4, 0.9909, 0.9758, 0.9667),
    ],
)
def test_check_02_mixed_placement_lies_between_the_ring_and_the_bound(
    nodes: int, m: int, best: float, mixed: float, full_ring: float
) -> None:
    every = comb(nodes, m)
    assert 1 - ceil(nodes / m) / every == pytest.approx(best, abs=5e-5)
    assert recovered(placed(nodes, m), m) / every == pytest.approx(mixed, abs=5e-5)
    assert recovered(ring(nodes, m), m) / every == pytest.approx(full_ring, abs=5e-5)


def test_check_02_seventeen_nodes_in_cliques_and_a_ring() -> None:
    placement = placed(17, 2)
    assert (recovered(placement, 3), recovered(placement, 4)) == (532, 1400)


@pytest.mark.parametrize("nodes", range(3, 17))
def test_check_22_with_three_copies_any_two_losses_are_recovered(nodes: int) -> None:
    assert recovered(placed(nodes, 3), 2) == comb(nodes, 2)


def test_check_22_three_copies_double_the_traffic() -> None:
    for nodes in range(3, 17):
        sent = {
            m: sum(len(holders) - 1 for holders in placed(nodes, m).holders.values())
            for m in (2, 3)
        }
        assert sent == {2: nodes, 3: 2 * nodes}


@pytest.mark.parametrize("nodes", [6, 7, 8])
def test_check_22_with_three_copies_any_two_lost_snapshots_are_found(nodes: int) -> None:
    assert fetched(placed(nodes, 3), 2) == comb(nodes, 2)


def instants(protocol: Protocol, steps: int) -> Iterator[World]:
    """Every instant of a run in which nothing is late: between any two happenings somebody may be
    killed."""
    world = protocol.first()
    for _ in range(steps):
        for boundary in list(protocol.steps(world)):
            world = protocol.apply(world, boundary)
            yield world
        while (move := next(protocol.useful(world), None)) is not None:
            world = protocol.apply(world, move)
            yield world


@pytest.mark.parametrize(("m", "nodes"), [(2, 4), (2, 3), (3, 3)])
def test_check_13_whoever_is_killed_in_any_phase_all_go_back_to_one_step_no_older_than_committed(
    m: int, nodes: int
) -> None:
    protocol = Protocol(Copies(m), nodes)
    seen = 0
    for world in instants(protocol, 3):
        for lost in protocol.losses:
            back = protocol.recover(world, lost)
            assert len(set(back.decided)) == 1
            (step,) = set(back.decided)
            assert all(step == -1 or max(sealed(slots)).step == step for slots in back.own), (
                "the same on all ranks, and whole"
            )
            if world.promised is not None:
                assert max(world.decided) - 2 <= world.promised.step <= step
                seen += 1
    assert seen > 100


def test_check_14_a_software_failure_fetches_nothing_and_a_lost_node_only_its_own() -> None:
    protocol = Protocol(Copies(2), 4, ranks_per_node=2)
    world = list(instants(protocol, 3))[-1]
    committed = world.led.committed
    assert committed is not None
    for lost in protocol.losses:
        left = protocol.inventories(world.own, world.held, lost)
        here = {
            rank
            for node, found in left.items()
            for rank, stamp in found.snapshots
            if stamp == committed and protocol.home[rank] == node
        }
        wanting = [rank for rank in protocol.ranks if rank not in here]
        assert wanting == [rank for node in lost for rank in protocol.mesh.ranks_of(node)]
        for rank, source in restore_sources(wanting, committed, left).items():
            assert set(source.copies) == set(protocol.assignments[rank].holders), (
                "each from its own holder, whole"
            )


def test_check_14_two_steps_after_a_replacement_there_are_m_copies_again() -> None:
    protocol = Protocol(Copies(2), 4)
    world = protocol.recover(list(instants(protocol, 3))[-1], (2,))
    for _ in range(2):
        for boundary in list(protocol.steps(world)):
            world = protocol.apply(world, boundary)
        world = protocol.settled(world)
    newest = Stamp(max(world.decided), 2)
    everything = protocol.inventories(world.own, world.held)
    assert all(
        sum((rank, newest) in found.snapshots for found in everything.values()) == 2
        for rank in protocol.ranks
    )


@pytest.mark.parametrize("group", range(8))
def test_check_15_a_lost_group_sends_everybody_to_the_same_checkpoint(group: int) -> None:
    """Memory still has the newer step of 14 nodes: nobody may use it."""
    left = after({2 * group, 2 * group + 1}, proven(placed(16, 2)))
    vote = Vote(16, has_store=True)
    for rank in range(16):
        answer = vote.joined(Ballot(rank, 16, restorable_stamps(rank, left)))
    assert answer == [ListStore()]
    (offer,) = vote.listed(StoreListing([3, 5]))
    assert isinstance(offer, Offer) and (offer.source, offer.stamp.step) == ("store", 5)
    assert offer.why.startswith("memory of rank") and f"rank {2 * group}" in offer.why


def test_check_15_every_loss_is_recovered_from_memory_or_else_from_the_store() -> None:
    everything = proven(placed(6, 2))
    found = {"memory": 0, "store": 0}
    for lost in (set(nodes) for k in range(7) for nodes in combinations(range(6), k)):
        left = after(lost, everything)
        vote = Vote(6, has_store=True)
        actions = [
            action
            for rank in range(6)
            for action in vote.joined(Ballot(rank, 6, restorable_stamps(rank, left)))
        ]
        (offer,) = vote.listed(StoreListing([5])) if actions == [ListStore()] else actions
        assert isinstance(offer, Offer)
        found[offer.source] += 1
    assert found == {"memory": 27, "store": 37}, (
        "a group of two survives 3 of its 4 cases, three groups 3 * 3 * 3 of 64"
    )


@pytest.mark.parametrize(("nodes", "m"), [(16, 2), (17, 2), (9, 3), (10, 3)])
def test_check_19_a_node_keeps_2_m_snapshots(nodes: int, m: int) -> None:
    assert placed(nodes, m).two_slots_ratio == 2 * m
    members = tuple(Member(node, "", 0, 1, 1) for node in range(nodes))
    here = [
        sum(
            node in assignment.holders
            for assignment in assignments(Copies(m), Mesh(1, 0, members, "")).values()
        )
        for node in range(nodes)
    ]
    assert set(here) == {m - 1} and memory_budget.held_slots(Copies(m)) == 2 * (m - 1)


def test_check_19_two_slots_and_what_is_held_are_counted_before_the_first_save() -> None:
    """GPT-2 100B on 16 machines of 8 GPUs: 9.4 GB a GPU, two of each of two checkpoints, 301 GB of
    1152."""
    each, free = int(9.4e9), int(1152e9)
    plan = memory_budget.plan(
        each,
        8,
        free,
        free,
        2,
        has_store=False,
        arena_dir="/dev/shm",
        held=memory_budget.held_slots(Copies(2)),
    )
    assert plan.slots == 2 and plan.total_bytes == 2 * 8 * each
    together = plan.total_bytes + memory_budget.held_slots(Copies(2)) * 8 * each
    assert together == 2 * 2 * 8 * each == pytest.approx(301e9, rel=0.01)
    enough = int(together / (1 - memory_budget.HEADROOM_RATIO)) + 1
    assert (
        memory_budget.plan(
            each, 8, enough, enough, 2, has_store=False, arena_dir="/dev/shm", held=2.0
        ).slots
        == 2
    )
    with pytest.raises(MemoryBudgetError, match="held for other nodes"):
        memory_budget.plan(
            each, 8, enough - GIB, enough - GIB, 2, has_store=False, arena_dir="/dev/shm", held=2.0
        )
