"""Which node or link is slow: properties over fleets of every shape."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.preflight.catalogue import LINK_SPEED, ROUND_TRIP
from keepstep.core.preflight.links import FaultSide, cover, faults, figures, suspect
from keepstep.core.preflight.schedule import all_pairs, confirming
from keepstep.model.messages.preflight import LinkReading
from keepstep.model.units import GIB
from tests.core.preflight.fleets import MadeFleet, healthy


def judged(fleet: MadeFleet) -> list[tuple[FaultSide, tuple[int, ...]]]:
    first = fleet.measure(all_pairs(range(len(fleet.nodes))))
    suspicion = suspect(first, [LINK_SPEED])
    again = [
        fleet.measure(confirming(suspicion.suspects, suspicion.good, suspicion.pairs, turn))
        for turn in range(2)
    ]
    return [(fault.side, fault.nodes) for fault in faults(first, again, LINK_SPEED, suspicion)]


@given(st.integers(3, 12), st.integers(0, 10**6), st.sampled_from(["sends", "receives", "both"]))
def test_one_slow_node_is_named_with_its_side(nodes: int, seed: int, side: str) -> None:
    fleet = healthy(nodes, seed)
    bad = seed % nodes
    if side != "receives":
        fleet.nodes[bad].sends = 0.2
    if side != "sends":
        fleet.nodes[bad].receives = 0.2
    expected = {
        "sends": FaultSide.SENDS,
        "receives": FaultSide.RECEIVES,
        "both": FaultSide.BOTH,
    }[side]
    assert judged(fleet) == [(expected, (bad,))]


@given(st.integers(4, 12), st.integers(0, 10**6), st.booleans())
def test_one_slow_link_is_named_by_its_ends(nodes: int, seed: int, is_one_way: bool) -> None:
    fleet = healthy(nodes, seed)
    one, other = random.Random(seed).sample(range(nodes), 2)
    fleet.links[one, other] = 0.1
    if not is_one_way:
        fleet.links[other, one] = 0.1
    assert judged(fleet) == [(FaultSide.LINK, (min(one, other), max(one, other)))]


@given(st.integers(7, 16), st.integers(0, 10**6))
def test_two_slow_nodes_are_both_named(nodes: int, seed: int) -> None:
    fleet = healthy(nodes, seed)
    bad = sorted(random.Random(seed).sample(range(nodes), 2))
    for node in bad:
        fleet.nodes[node].sends = fleet.nodes[node].receives = 0.1
    assert judged(fleet) == [(FaultSide.BOTH, (node,)) for node in bad]


@pytest.mark.parametrize("side", ["sends", "receives"])
@pytest.mark.parametrize("slow_turns", [[], [0], [1]])
def test_what_is_not_slow_every_time_accuses_nobody(side: str, slow_turns: list[int]) -> None:
    fleet = healthy(4)
    setattr(fleet.nodes[1], side, 0.1)
    first = fleet.measure(all_pairs(range(4)))
    suspicion = suspect(first, [LINK_SPEED])
    assert suspicion.suspects == (1,) and suspicion.good == (0, 2, 3)
    again = []
    for turn in range(2):
        setattr(fleet.nodes[1], side, 0.1 if turn in slow_turns else 1.0)
        rounds = confirming(suspicion.suspects, suspicion.good, suspicion.pairs, turn)
        again.append(fleet.measure(rounds))
    assert faults(first, again, LINK_SPEED, suspicion) == []


def test_an_unconfirmed_suspicion_of_a_node_accuses_no_node() -> None:
    fleet = healthy(4)
    fleet.nodes[1].sends = 0.1
    first = fleet.measure(all_pairs(range(4)))
    found = faults(first, [], LINK_SPEED, suspect(first, [LINK_SPEED]))
    assert all(fault.side is FaultSide.LINK for fault in found)


def cut(fleet: MadeFleet, node: int, readings: tuple[LinkReading, ...]) -> tuple[LinkReading, ...]:
    return tuple(
        LinkReading(r.one, r.other, error="timed out") if node in (r.one, r.other) else r
        for r in readings
    )


def test_a_node_that_nobody_reaches_is_named_with_the_error() -> None:
    fleet = healthy(4)
    first = cut(fleet, 2, fleet.measure(all_pairs(range(4))))
    suspicion = suspect(first, [LINK_SPEED])
    rounds = confirming(suspicion.suspects, suspicion.good, suspicion.pairs, 0)
    again = cut(fleet, 2, fleet.measure(rounds))
    (fault,) = faults(first, [again], LINK_SPEED, suspicion)
    assert (fault.nodes, fault.value, fault.error) == ((2,), 0, "timed out")


def test_two_nodes_have_only_the_floor() -> None:
    fleet = healthy(2)
    fleet.links[0, 1] = 0.01
    assert judged(fleet) == []
    fleet.links[0, 1] = 0.0001
    assert judged(fleet) == [(FaultSide.LINK, (0, 1))]


def test_round_trips_count_in_both_directions_and_only_where_they_hurt() -> None:
    readings = [LinkReading(0, 1, (GIB,), (GIB,), (50_000,))]
    assert figures(readings, ROUND_TRIP) == [((0, 1), 50_000), ((1, 0), 50_000)]
    near = [LinkReading(a, b, (GIB,), (GIB,), (20_000,)) for a, b in ((0, 1), (0, 2))]
    assert not suspect([*near, LinkReading(1, 2, (GIB,), (GIB,), (900_000,))], [ROUND_TRIP]).pairs
    far = suspect([*near, LinkReading(1, 2, (GIB,), (GIB,), (9_000_000,))], [ROUND_TRIP])
    assert far.pairs == ((1, 2),) and far.suspects == (1, 2) and far.good == (0,)


pairs = st.sets(
    st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda p: p[0] < p[1]), max_size=20
)


@given(pairs)
def test_a_cover_explains_every_pair_and_names_nobody_else(slow: set[tuple[int, int]]) -> None:
    suspects = cover(slow)
    assert all(suspects & set(each) for each in slow)
    assert suspects <= {node for each in slow for node in each}
