"""From measurements to a verdict: every planted defect is named where it is, nothing else is, and
sound fleets pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core.preflight.catalogue import (
    DISK,
    MEMORY,
    MEMORY_SPEED,
    NETWORK,
    PRODUCTS,
    RING,
    SAME,
    TRAINING,
    with_floors,
)
from keepstep.core.preflight.judgement import FleetEvidence, PreflightVerdict, judge
from keepstep.model.messages.preflight import CheckOutcome, CheckReading
from keepstep.model.units import GIB
from tests.core.preflight.fleets import PLANTS, healthy


def named(verdict: PreflightVerdict) -> set[tuple[str, tuple[int, ...]]]:
    return {(finding.check, finding.nodes) for finding in verdict.findings}


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 9, 32])
def test_sound_fleets_pass_whatever_their_noise(nodes: int) -> None:
    for seed in range(50):
        fleet = healthy(nodes, seed)
        fleet.noise, fleet.luck = 0.01 * (seed % 12), 0.01 * (seed % 7)
        verdict = judge(fleet.evidence())
        assert (verdict.findings, verdict.exit_code) == ((), 0), seed


@pytest.mark.parametrize("defect", PLANTS)
def test_a_planted_defect_is_named_and_nothing_else(defect: str) -> None:
    check, plant = PLANTS[defect]
    for seed in range(20):
        nodes = 3 + seed % 6
        node = seed % nodes
        fleet = healthy(nodes, seed)
        plant(fleet, node)
        verdict = judge(fleet.evidence())
        assert named(verdict) == {(check, (node,))}, seed
        assert verdict.exit_code == 1 and verdict.is_bad(node)
        assert not any(verdict.is_bad(other) for other in range(nodes) if other != node)
        assert verdict.outcomes[check][node] is CheckOutcome.BAD
        (finding,) = verdict.findings
        assert finding.found and finding.why and finding.fix


def test_all_defects_at_once_are_all_named() -> None:
    """Each on a node of its own, in a fleet in which they are the minority."""
    for seed in range(20):
        fleet = healthy(32, seed)
        wanted = set()
        for node, (check, plant) in enumerate(PLANTS.values()):
            plant(fleet, node)
            wanted.add((check, (node,)))
        assert named(judge(fleet.evidence())) == wanted


def test_a_link_between_sound_nodes_is_named_by_its_ends() -> None:
    for seed in range(20):
        fleet = healthy(5, seed)
        fleet.links[1, 3] = 0.1
        verdict = judge(fleet.evidence())
        assert named(verdict) == {(NETWORK, (1, 3))}
        assert (
            "the link between node 1 (host1), node 3 (host3) is slow" in verdict.findings[0].found
        )


def test_the_side_is_told() -> None:
    fleet = healthy(5)
    fleet.nodes[2].receives = 0.1
    (finding,) = judge(fleet.evidence()).findings
    assert finding.nodes == (2,) and "it receives slowly with every sound partner" in finding.found


def test_a_fleet_that_is_slow_as_a_whole_fails_by_the_floor() -> None:
    fleet = healthy(4)
    for node in fleet.nodes:
        node.factors["memory-speed"] = 0.01
    verdict = judge(fleet.evidence())
    assert named(verdict) == {("memory-speed", (node,)) for node in range(4)}
    assert "the floor is 256.0 MiB/s" in verdict.findings[0].found
    assert (
        "memory-speed fails on 4 of 4 nodes: look for a cause that they share" in verdict.notes[0]
    )


def test_a_floor_of_ones_own() -> None:
    evidence = replace(healthy(4).evidence(), quantities=with_floors({"link-speed": 100 * GIB}))
    assert {check for check, _ in named(judge(evidence))} == {NETWORK}


def test_two_nodes_are_held_against_floors_alone_and_differ_without_a_culprit() -> None:
    fleet = healthy(2)
    fleet.nodes[1].factors["memory-speed"] = 0.3
    verdict = judge(fleet.evidence())
    assert not verdict.findings and "no fleet to compare with" in verdict.notes[0]
    fleet.nodes[1].loss = "c" * 32
    (finding,) = judge(fleet.evidence()).findings
    assert finding.nodes == (0, 1) and "who is right, nobody can tell" in finding.found


def with_reading(evidence: FleetEvidence, node: int, reading: CheckReading) -> FleetEvidence:
    readings = {
        n: tuple(reading if n == node and r.check == reading.check else r for r in given)
        for n, given in evidence.readings.items()
    }
    return replace(evidence, readings=readings)


def test_no_answer_is_never_ok() -> None:
    fleet = healthy(4).evidence()
    dumb = with_reading(
        fleet, 2, CheckReading(MEMORY, CheckOutcome.UNKNOWN, "no answer within 9 s")
    )
    verdict = judge(dumb)
    assert verdict.exit_code == 2 and verdict.outcomes[MEMORY][2] is CheckOutcome.UNKNOWN
    assert not any("fails on" in note for note in verdict.notes)
    assert verdict.findings[0].found == "no answer within 9 s" and not verdict.is_bad(2)
    forgotten = {n: [r for r in given if r.check != RING] for n, given in fleet.readings.items()}
    verdict = judge(replace(fleet, readings={n: tuple(given) for n, given in forgotten.items()}))
    assert verdict.exit_code == 2 and len(verdict.findings) == 4


def test_who_says_that_all_is_well_and_has_measured_nothing_is_unknown() -> None:
    for check in (MEMORY_SPEED, DISK, PRODUCTS):
        empty = with_reading(healthy(4).evidence(), 1, CheckReading(check, CheckOutcome.OK))
        verdict = judge(empty)
        assert verdict.exit_code == 2 and verdict.outcomes[check][1] is CheckOutcome.UNKNOWN
        assert "has measured nothing" in verdict.findings[0].found


def test_a_silent_node_is_named_and_unknown() -> None:
    fleet = healthy(4).evidence()
    readings = {node: given for node, given in fleet.readings.items() if node != 3}
    verdict = judge(replace(fleet, readings=readings, silent={3: "nothing came of it"}))
    assert verdict.exit_code == 2 and [f.nodes for f in verdict.findings] == [(3,)]
    assert all(row[3] is CheckOutcome.UNKNOWN for row in verdict.outcomes.values())


def test_a_defect_counts_more_than_silence() -> None:
    fleet = healthy(4)
    PLANTS["another loss"][1](fleet, 1)
    evidence = with_reading(
        fleet.evidence(), 2, CheckReading(MEMORY, CheckOutcome.UNKNOWN, "no answer")
    )
    assert judge(evidence).exit_code == 1


def test_step_times_of_nodes_that_share_a_machine_are_not_compared() -> None:
    fleet = healthy(4)
    fleet.nodes[1].factors["training-step"] = 5
    evidence = fleet.evidence()
    shared = replace(evidence, machines=dict.fromkeys(range(4), "one"))
    assert named(judge(evidence)) == {(TRAINING, (1,))} and not judge(shared).findings


def test_different_hardware_may_have_different_losses_and_not_different_software() -> None:
    evidence = healthy(4).evidence()
    kinds = {}
    for node, given in evidence.readings.items():
        kinds[node] = tuple(
            replace(r, traits=tuple(replace(t, kind=f"k{node}", value=f"{node}") for t in r.traits))
            if r.check == TRAINING
            else r
            for r in given
        )
    assert not judge(replace(evidence, readings=kinds)).findings
    fleet = healthy(4)
    fleet.nodes[0].versions["python"] = "3.10"
    assert named(judge(fleet.evidence())) == {(SAME, (0,))}
