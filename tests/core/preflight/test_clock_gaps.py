"""Whose clock is wrong, from readings that are certain within a bound."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.preflight.catalogue import CLOCKS, NETWORK, with_floors
from keepstep.core.preflight.clock_gaps import FleetClocks, judge_clocks
from keepstep.core.preflight.judgement import judge
from keepstep.core.preflight.schedule import all_pairs
from keepstep.model.messages.preflight import CheckOutcome, ClockGap, LinkReading
from keepstep.model.units import MS_NS, S_NS
from tests.core.preflight.fleets import healthy

LIMIT_NS = 100 * MS_NS


def read(
    ahead_ns: dict[int, int], within_ns: int = MS_NS, rounds: int = 99, seed: int = 0
) -> list[LinkReading]:
    """What pairs would have read of clocks that are so far ahead."""
    drawn = random.Random(seed)
    pairs = [pair for each in all_pairs(sorted(ahead_ns))[:rounds] for pair in each]
    found = []
    for one, other in pairs:
        wrong_ns = drawn.randint(-within_ns, within_ns)
        gap = ClockGap(ahead_ns[other] - ahead_ns[one] + wrong_ns, within_ns)
        found.append(LinkReading(one, other, clock=gap))
    return found


def judged(ahead_ns: dict[int, int], within_ns: int = MS_NS, **more: int) -> FleetClocks:
    return judge_clocks(ahead_ns, read(ahead_ns, within_ns, **more), LIMIT_NS)


@given(
    nodes=st.integers(3, 40),
    wrong=st.integers(0, 39),
    ahead_ms=st.one_of(st.integers(110, 10**9), st.integers(-(10**9), -110)),
    seed=st.integers(0, 1000),
)
def test_the_one_that_is_off_is_named_and_nobody_else(
    nodes: int, wrong: int, ahead_ms: int, seed: int
) -> None:
    """Of a large fleet not all pairs are measured."""
    ahead_ns = {n: ahead_ms * MS_NS if n == wrong % nodes else 0 for n in range(nodes)}
    found = judged(ahead_ns, rounds=31, seed=seed)
    assert found.off == (wrong % nodes,) and found.is_decided
    assert found.unsure == found.unseen == ()
    gap = found.gaps[wrong % nodes]
    assert abs(gap.ahead_ns - ahead_ms * MS_NS) <= gap.within_ns <= 4 * MS_NS


@given(
    ahead_ms=st.lists(st.integers(-500, 500), min_size=2, max_size=12),
    within_ms=st.integers(0, 200),
    seed=st.integers(0, 1000),
)
def test_nobody_is_named_whom_the_bounds_explain(
    ahead_ms: list[int], within_ms: int, seed: int
) -> None:
    """All gaps are true, within their bounds, against one of the nodes. Where a majority decides,
    who is named is farther from that one than the limit, and who is passed is not."""
    true_ns = {n: ahead * MS_NS for n, ahead in enumerate(ahead_ms)}
    found = judged(true_ns, within_ms * MS_NS, seed=seed)
    middles = [
        middle_ns
        for middle_ns in true_ns.values()
        if all(
            abs(true_ns[n] - middle_ns - gap.ahead_ns) <= gap.within_ns
            for n, gap in found.gaps.items()
        )
    ]
    assert middles
    if not found.is_decided:
        assert found.off == tuple(true_ns) and not found.unsure
        return
    for node, ahead_ns in true_ns.items():
        if node in found.off:
            assert all(abs(ahead_ns - middle_ns) > LIMIT_NS for middle_ns in middles)
        elif node not in found.unsure:
            assert all(abs(ahead_ns - middle_ns) <= LIMIT_NS for middle_ns in middles)


def test_two_that_differ_are_both_named() -> None:
    found = judged({0: 0, 1: S_NS})
    assert found.off == (0, 1) and not found.is_decided


def test_half_of_a_fleet_is_no_majority() -> None:
    for wrong_ns in (-S_NS, S_NS):
        found = judged({0: 0, 1: 0, 2: wrong_ns, 3: wrong_ns})
        assert found.off == (0, 1, 2, 3) and not found.is_decided


@pytest.mark.parametrize(("ahead_ms", "is_off"), [(95, False), (99, False), (104, True)])
def test_what_a_bound_can_explain_is_unknown(ahead_ms: int, is_off: bool) -> None:
    nodes = {0: 0, 1: 0, 2: ahead_ms * MS_NS}
    exact = judged(nodes, within_ns=0)
    assert (exact.off == (2,)) is is_off and not exact.unsure
    rough = judged(nodes, within_ns=20 * MS_NS)
    assert rough.off == () and 2 in rough.unsure


def test_bounds_add_up_along_the_best_path() -> None:
    """0 and 2 have not met; over 1 it is surer than over 3."""
    links = [
        LinkReading(0, 1, clock=ClockGap(10, 1)),
        LinkReading(1, 2, clock=ClockGap(10, 2)),
        LinkReading(0, 3, clock=ClockGap(900, 500)),
        LinkReading(2, 3, clock=ClockGap(-900, 500)),
        LinkReading(1, 3),
    ]
    gaps = judge_clocks(range(4), links, LIMIT_NS).gaps
    # the median is node 1, whose own bound is that of its way to node 0
    assert gaps == {
        0: ClockGap(-10, 1),
        1: ClockGap(0, 0),
        2: ClockGap(10, 4),
        3: ClockGap(890, 501),
    }


def test_who_was_not_read_is_unknown() -> None:
    links = read({0: 0, 1: 0, 2: 0})
    assert judge_clocks(range(4), links, LIMIT_NS).unseen == (3,)
    assert judge_clocks(range(4), [], LIMIT_NS).unseen == (0, 1, 2, 3)


# -- in a verdict


def test_a_verdict_names_the_node_and_tells_the_figures() -> None:
    fleet = healthy(4)
    fleet.nodes[2].ahead_ns = 250 * MS_NS
    verdict = judge(fleet.evidence())
    (finding,) = verdict.findings
    assert (finding.check, finding.nodes) == (CLOCKS, (2,))
    assert "its clock is 250.0 ms ahead, known to " in finding.found
    assert "at most 100.0 ms passes" in finding.found
    assert verdict.figures["clock-offset"][2] > 249 * MS_NS > verdict.figures["clock-offset"][1]
    assert verdict.outcomes[CLOCKS] == {
        0: CheckOutcome.OK,
        1: CheckOutcome.OK,
        2: CheckOutcome.BAD,
        3: CheckOutcome.OK,
    }


def test_the_limit_is_a_floor_of_ones_own() -> None:
    fleet = healthy(4)
    fleet.nodes[2].ahead_ns = 250 * MS_NS
    evidence = fleet.evidence()
    for limit_ns, count in ((S_NS, 0), (300 * MS_NS, 0), (200 * MS_NS, 1)):
        quantities = with_floors({"clock-offset": limit_ns})
        judged = judge(replace(evidence, quantities=quantities))
        assert len(judged.findings) == count


def test_clocks_alone_accuse_no_link_and_are_unknown_unread() -> None:
    """`--only clocks`: nothing was sent but round trips."""
    evidence = healthy(3).evidence()
    links = tuple(LinkReading(link.one, link.other, clock=link.clock) for link in evidence.links)
    alone = replace(evidence, planned=(CLOCKS,), readings={}, links=links, confirming=())
    assert not judge(alone).findings
    silent = tuple(LinkReading(link.one, link.other) for link in links)
    verdict = judge(replace(alone, links=silent))
    assert {each.outcome for each in verdict.findings} == {CheckOutcome.UNKNOWN}
    assert {each.check for each in verdict.findings} == {CLOCKS}
    assert verdict.exit_code == 2 and NETWORK not in verdict.outcomes
