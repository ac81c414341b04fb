"""REFT (arXiv 2310.12670): rotating parity over groups of nodes, and what it survives.

No code and no table of the paper's survival figures is public; the formulas are derived from the
layout and checked by simulation, the write hole and the fall back to the store on the protocol's
model.
"""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations
from math import comb

import pytest

from keepstep.core.redundancy import memory_budget
from keepstep.core.redundancy.placement import place
from keepstep.core.redundancy.stripes import Stripes, decode_plan, stripes_of_snapshots
from keepstep.core.redundancy.survival import out_of_reach, survival, survival_at, which_can_be_lost
from keepstep.core.resume.sources import restorable_stamps, restore_sources
from keepstep.core.resume.vote import Ballot, ListStore, Offer, Vote
from keepstep.model.checkpoint import StoreListing
from keepstep.model.restore_sources import HeldParity, Inventory
from keepstep.model.snapshot import Stamp
from keepstep.model.topology import Copies, NoRedundancy, Parity, topology
from tests.core.parity_memory import carry_out, encode_plan, encoded
from tests.core.protocol_model import Protocol, sealed

ODD_BYTES = 1_000_003  # divides into nothing evenly


def shared(n: int) -> Stripes:
    """So many bytes, in shares as equal as they can be."""
    return stripes_of_snapshots(
        range(n), 1, [ODD_BYTES * i // n - ODD_BYTES * (i - 1) // n for i in range(1, n + 1)]
    )


@pytest.mark.parametrize("n", range(2, 9))
def test_every_single_loss_decodes_to_the_bit(n: int) -> None:
    stripes = shared(n)
    whole = encoded(stripes, seed=n)
    for lost in range(n):
        memory = {
            place: bytearray(len(found)) if place[0] == lost else bytearray(found)
            for place, found in whole.items()
        }
        carry_out(decode_plan(stripes, {lost}, lost), stripes, memory)
        assert memory == whole


@pytest.mark.parametrize("n", range(2, 9))
def test_memory_is_n_to_n_minus_1_within_padding(n: int) -> None:
    stripes = shared(n)
    held = sum(stripes.data_bytes) + n * stripes.parity_bytes
    assert 0 <= held - ODD_BYTES * n / (n - 1) <= n * 64
    assert place(Parity(n), topology(4 * n)).bytes_per_node_ratio == pytest.approx(n / (n - 1))


@pytest.mark.parametrize("n", range(2, 9))
def test_traffic_of_sharded_state_is_one_snapshot_out_and_in(n: int) -> None:
    share = 64 * (n - 1) * 10
    stripes = stripes_of_snapshots(range(n), 1, [share] * n)
    out = dict.fromkeys(range(n), 0)
    for member in range(n):
        incoming = [p for combine in encode_plan(stripes, member) for p in combine.sources]
        assert sum(p.nbytes for p in incoming) == share
        for p in incoming:
            out[p.member] += p.nbytes
    assert set(out.values()) == {share}


def test_two_losses_in_a_group_are_refused_not_guessed() -> None:
    placement = place(Parity(4), topology(8))
    assert out_of_reach(placement, placement.holders, {0, 4}) == ()
    assert out_of_reach(placement, placement.holders, {1, 2}) == (1, 2)
    assert (
        which_can_be_lost(placement, range(8), placement.holders).why
        == "any one of 8 nodes may be lost"
    )
    stripes = stripes_of_snapshots(range(4), 1, [100] * 4)
    with pytest.raises(AssertionError, match="1 tolerated"):
        decode_plan(stripes, {1, 2}, 1)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_exactly_k_losses_follow_the_closed_form(n: int) -> None:
    nodes = 16
    for k, exact in survival(place(Parity(n), topology(nodes)).groups, nodes).items():
        assert exact == (
            Fraction(comb(nodes // n, k) * n**k, comb(nodes, k)) if k <= nodes // n else 0
        )


def test_the_row_for_groups_of_four() -> None:
    chances = survival(place(Parity(4), topology(16)).groups, 4)
    assert [float(chances[k]) for k in range(1, 5)] == pytest.approx(
        [1, 0.8, 0.457, 0.141], abs=5e-4
    )


@pytest.mark.parametrize(
    ("policy", "at_9999", "at_999", "at_99"),
    [
        (NoRedundancy(), 0.903, 0.359, 0.0),
        (Copies(2), 0.999995, 0.99949, 0.950),
        (Parity(2), 0.999995, 0.99949, 0.950),
        (Parity(4), 0.999985, 0.99847, 0.859),
        (Parity(8), 0.999964, 0.99644, 0.708),
    ],
    ids=str,
)
def test_a_window_on_1024_nodes(
    policy: Copies | Parity | NoRedundancy, at_9999: float, at_999: float, at_99: float
) -> None:
    groups = place(policy, topology(1024)).groups
    assert survival_at(groups, 0.9999) == pytest.approx(
        at_9999, abs=5e-4 if isinstance(policy, NoRedundancy) else 5e-7
    )
    assert survival_at(groups, 0.999) == pytest.approx(
        at_999, abs=5e-4 if isinstance(policy, NoRedundancy) else 5e-6
    )
    assert survival_at(groups, 0.99) == pytest.approx(at_99, abs=5e-4)


@pytest.mark.parametrize(("n", "keep"), [(2, 0.95), (4, 0.97), (4, 0.99), (8, 0.99)])
def test_a_simulation_agrees(n: int, keep: float) -> None:
    nodes, trials, rng = 64, 3000, random.Random(2310)
    placement = place(Parity(n), topology(nodes))
    formula = (keep**n + n * keep ** (n - 1) * (1 - keep)) ** (nodes // n)
    assert survival_at(placement.groups, keep) == pytest.approx(formula)
    survived = 0
    for _ in range(trials):
        lost = {node for node in range(nodes) if rng.random() > keep}
        survived += not out_of_reach(placement, placement.holders, lost)
    assert abs(survived / trials - formula) < 4 * (formula * (1 - formula) / trials) ** 0.5


STEP = Stamp(7, 1)


def proven(n: int, nodes: int) -> dict[int, Inventory]:
    """What every node of one rank holds once the step is committed: its data, and a parity beside
    it."""
    found = {}
    for group in place(Parity(n), topology(nodes)).groups:
        for rank in group.members:
            found[rank] = Inventory(
                frozenset({(rank, STEP)}),
                frozenset({HeldParity(rank, STEP, group.members, group.tolerates)}),
            )
    return found


@pytest.mark.parametrize("n", [2, 4, 8])
def test_of_all_losses_of_16_nodes_exactly_those_with_one_in_a_group_are_decoded(n: int) -> None:
    everything = proven(n, 16)
    for k in (1, 2, 3):
        survived = 0
        for lost in combinations(range(16), k):
            left = {node: found for node, found in everything.items() if node not in lost}
            survived += all(STEP in restorable_stamps(rank, left) for rank in lost)
        assert survived == (comb(16 // n, k) * n**k if k <= 16 // n else 0)


def test_a_lost_node_is_decoded_from_its_own_group_only() -> None:
    everything = proven(4, 8)
    del everything[5]
    assert restore_sources([5], STEP, everything)[5].members == ((4, 4), (6, 6), (7, 7))


def test_two_of_a_group_lost_sends_everybody_to_the_store() -> None:
    left = {node: found for node, found in proven(4, 8).items() if node not in (1, 2)}
    vote = Vote(8, has_store=True)
    for rank in range(8):
        answer = vote.joined(Ballot(rank, 8, restorable_stamps(rank, left)))
    assert answer == [ListStore()]
    (offer,) = vote.listed(StoreListing([4, 6]))
    assert isinstance(offer, Offer) and (offer.source, offer.stamp.step) == ("store", 6)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_write_hole_is_closed_at_every_instant_of_a_step(n: int) -> None:
    """Data of one step with parity of another decode to garbage. Whoever is killed between any two
    writes, what all go back to has both."""
    protocol = Protocol(Parity(n), n)
    world = protocol.settled(protocol.first())
    half_written = 0
    for _ in range(3):
        moves = list(protocol.steps(world))
        while moves:
            world = protocol.apply(world, moves.pop(0))
            parities = {frozenset(sealed(slots)) for slots in world.held}
            half_written += len(parities) > 1
            for lost in protocol.losses:
                back = protocol.recover(world, lost)
                (step,) = set(back.decided)
                assert world.promised is None or step >= world.promised.step
                if lost and step >= 0:
                    left = protocol.inventories(world.own, world.held, lost)
                    stamp = max(protocol.reachable(left))
                    for source in restore_sources(lost, stamp, left).values():
                        for rank, node in source.members:
                            assert (rank, stamp) in left[node].snapshots
                            assert (
                                HeldParity(rank, stamp, source.stripe_group, source.tolerates)
                                in left[node].parities
                            )
            moves = moves or [*protocol.useful(world)][:1]
        assert world.led.committed == Stamp(max(world.decided), 1)
    assert half_written > 0, "some instants lie between two parities"


@pytest.mark.parametrize("n", range(2, 9))
def test_what_is_held_for_others_is_counted_as_the_formula_says(n: int) -> None:
    """Two slots of parity beside two of data: 2 n / (n - 1) of a snapshot."""
    assert 2 + memory_budget.held_slots(Parity(n)) == pytest.approx(2 * n / (n - 1))
    assert place(Parity(n), topology(2 * n)).two_slots_ratio == pytest.approx(2 * n / (n - 1))
