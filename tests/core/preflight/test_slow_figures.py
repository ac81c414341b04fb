"""Slow figures: what is slow once accuses nobody, what is slow twice is named, and what was wrong
once stays wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core.preflight.catalogue import DISK, MEMORY_SPEED, PRODUCTS, RING, with_floors
from keepstep.core.preflight.judgement import FleetEvidence, judge
from keepstep.core.preflight.slow_figures import both_looks, second_looks
from keepstep.model.messages.preflight import CheckOutcome, CheckReading, Samples
from tests.core.preflight.fleets import healthy

SLOW = {"disk-write": 0.05, "disk-sync": 100.0, "memory-speed": 0.3, "products": 0.3}
QUANTITIES = with_floors({})


def looked_twice(first: FleetEvidence, again: FleetEvidence) -> FleetEvidence:
    """As the nodes do it: of the second readings those count that were asked for."""
    wanted = second_looks(first.readings, first.machines, first.quantities)
    more = {
        node: tuple(r for r in again.readings[node] if r.check in checks)
        for node, checks in wanted.items()
    }
    readings, twice = both_looks(first.readings, more, first.quantities)
    return replace(first, readings=readings, looked_twice=twice)


@pytest.mark.parametrize("nodes", [1, 3, 4, 9])
@pytest.mark.parametrize(
    ("figure", "check"),
    [("disk-write", DISK), ("memory-speed", MEMORY_SPEED), ("products", PRODUCTS)],
)
def test_what_is_slow_once_accuses_nobody(nodes: int, figure: str, check: str) -> None:
    for seed in range(20):
        fleet = healthy(nodes, seed)
        node = seed % nodes
        fleet.nodes[node].factors[figure] = SLOW[figure] if nodes > 1 else 0.001
        first = fleet.evidence()
        assert judge(first).is_bad(node), "one look would have accused it"
        fleet.nodes[node].factors.clear()
        verdict = judge(looked_twice(first, fleet.evidence()))
        assert verdict.findings == (), seed


@pytest.mark.parametrize("figure", SLOW)
def test_what_is_slow_twice_is_named_and_it_says_so(figure: str) -> None:
    for seed in range(20):
        fleet = healthy(4, seed)
        fleet.nodes[2].factors[figure] = SLOW[figure]
        twice = looked_twice(fleet.evidence(), fleet.evidence())
        (finding,) = judge(twice).findings
        assert finding.nodes == (2,) and finding.found.endswith("; measured twice"), seed


def test_only_what_was_slow_is_run_again_and_the_ring_never() -> None:
    fleet = healthy(5, 1)
    fleet.nodes[1].factors |= {"disk-sync": 100.0, "products": 0.3}
    fleet.nodes[3].factors["ring"] = 0.0001
    evidence = fleet.evidence()
    found = second_looks(evidence.readings, evidence.machines, evidence.quantities)
    assert found == {1: {DISK, PRODUCTS}}
    assert judge(evidence).is_bad(3)


def disk(outcome: CheckOutcome, *speeds: int, found: str = "") -> CheckReading:
    return CheckReading(DISK, outcome, found, samples=(Samples("disk-write", speeds),), took_ms=7)


OK, BAD, UNKNOWN = CheckOutcome.OK, CheckOutcome.BAD, CheckOutcome.UNKNOWN


@pytest.mark.parametrize("wrong_first", [True, False])
def test_wrong_bytes_stay_wrong_whichever_look_saw_them(wrong_first: bool) -> None:
    looks = [disk(BAD, 100, found="other bytes"), disk(OK, 900)]
    first, again = looks if wrong_first else looks[::-1]
    readings, twice = both_looks({0: (first,)}, {0: (again,)}, QUANTITIES)
    (reading,) = readings[0]
    assert (reading.outcome, reading.found) == (BAD, "other bytes")
    assert reading.samples == (Samples("disk-write", (900,)),) and reading.took_ms == 14
    assert twice == {(0, DISK)}


def test_a_second_look_without_an_answer_was_none() -> None:
    first = {0: (disk(OK, 5),), 1: (disk(OK, 6),)}
    again = {0: (replace(disk(UNKNOWN), samples=()),)}
    assert both_looks(first, again, QUANTITIES) == (first, frozenset())


def test_of_times_the_shorter_ones_are_faster() -> None:
    def sync(*values: int) -> CheckReading:
        return CheckReading(DISK, OK, samples=(Samples("disk-sync", values),))

    readings, _ = both_looks({0: (sync(9, 9, 2),)}, {0: (sync(5, 4, 5),)}, QUANTITIES)
    assert readings[0][0].samples == (Samples("disk-sync", (5, 4, 5)),)


def test_figures_that_nobody_knows_stay_as_they_were() -> None:
    odd = CheckReading(RING, OK, samples=(Samples("of another build", (1,)), Samples("ring", ())))
    readings, _ = both_looks({0: (odd,)}, {0: (odd,)}, QUANTITIES)
    assert readings[0][0].samples == odd.samples
