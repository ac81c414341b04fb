"""What is done about a slow rank is the cheapest that helps, and the sentence says its price."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from keepstep.core.balance.remedy import MOST_SHARED, SlowFacts, remedy
from keepstep.core.economics.swap_price import ASSUMED_NS as SWAP_NS
from keepstep.core.economics.swap_price import SwapPrice
from keepstep.model.step_work import JUDGED, PASSES, Section, Slow, SlowCause
from keepstep.model.units import MS_NS, S_NS

SLOW = Slow(
    rank=2,
    section=Section.COMPUTE,
    cause="compute",
    since_step=300,
    own_ns=140 * MS_NS,
    peers_ns=70 * MS_NS,
    excess_ns=70 * MS_NS,
    excess_ratio=1.0,
    has_peers=True,
    is_standing=False,
    why="",
)
FACTS = SlowFacts(SLOW, 4, {}, 0, 0, "the job has one node")
COSTS = {0: 10 * MS_NS, 1: 10 * MS_NS, 2: 20 * MS_NS, 3: 10 * MS_NS}


def test_where_nothing_is_shared_it_is_observed_and_what_sharing_would_bring_is_told() -> None:
    found = remedy(FACTS)
    assert (found.rung, found.left_ns) == ("observe", 70 * MS_NS)
    assert "nothing is changed" in found.why and "the job has one node" in found.why
    assert "would lose 14 % of a step instead of 100 %" in found.why


@pytest.mark.parametrize(("excess_ratio", "left_ms"), [(0.5, 0), (1.0, 0), (3.0, 70)])
def test_who_is_left_out_costs_what_is_beyond_two_steps(excess_ratio: float, left_ms: int) -> None:
    """It computes every second step, of 70 ms: at a quarter of the speed all wait for two."""
    slow = replace(SLOW, excess_ratio=excess_ratio, excess_ns=int(70 * excess_ratio) * MS_NS)
    facts = replace(FACTS, slow=slow, costs_ns=COSTS, total=4, computes_ratio=0.5)
    found = remedy(facts)
    assert (found.rung, found.left_ns) == ("leave-out", left_ms * MS_NS)
    assert "has computed in 50 % of its steps" in found.why
    advised = remedy(replace(facts, costs_ns={}, total=0, computes_ratio=1.0))
    assert advised.rung == "observe"
    assert f"with job.partial_sum {100 * left_ms // 70} %" in advised.why
    assert "job.local_steps saves nothing" in advised.why


def test_who_is_left_out_for_nothing_is_swapped_when_that_is_lost() -> None:
    slow = replace(SLOW, excess_ratio=3.0, excess_ns=210 * MS_NS)
    facts = replace(FACTS, slow=slow, computes_ratio=0.5, why_no_swap="", lost_ns=SWAP_NS)
    assert remedy(facts).rung == "swap"
    assert remedy(replace(facts, slow=SLOW)).rung == "leave-out", "nothing is lost"


def test_who_is_alone_is_not_told_of_sharing() -> None:
    assert "micro_batches" not in remedy(replace(FACTS, ranks=1)).why


def test_where_micro_batches_are_shared_the_price_is_what_is_left() -> None:
    found = remedy(replace(FACTS, costs_ns=COSTS, total=28))
    assert (found.rung, found.left_ns) == ("rebalance", 10 * MS_NS)
    assert "with 4 of 28 for it a step takes 10.0 ms longer instead of 70.0 ms" in found.why


def test_too_few_to_share_are_not_shared() -> None:
    assert remedy(replace(FACTS, costs_ns=COSTS, total=7)).rung == "observe"


@pytest.mark.timeout(20)
def test_more_than_anybody_shares_holds_up_nobody() -> None:
    """A damaged page may claim any number, and whoever decides this watches the ranks besides."""
    assert remedy(replace(FACTS, costs_ns=COSTS, total=MOST_SHARED)).rung == "rebalance"
    assert remedy(replace(FACTS, costs_ns=COSTS, total=1 << 62)).rung == "observe"


@pytest.mark.parametrize("costs", [{}, COSTS])
def test_a_swap_comes_when_what_it_costs_is_lost_and_not_before(costs: dict[int, int]) -> None:
    facts = replace(FACTS, costs_ns=costs, total=28, why_no_swap="")
    early = remedy(replace(facts, lost_ns=SWAP_NS - 1))
    assert early.rung != "swap" and "no swap for a spare before 60.00 s are lost" in early.why
    late = remedy(replace(facts, lost_ns=SWAP_NS))
    assert late.rung == "swap" and "leaves its place to a spare" in late.why
    assert remedy(replace(facts, lost_ns=SWAP_NS, why_no_swap="no")).rung != "swap"


@pytest.mark.parametrize("costs", [{}, COSTS])
def test_where_the_program_has_more_to_do_no_node_is_swapped(costs: dict[int, int]) -> None:
    facts = replace(FACTS, costs_ns=costs, total=28, why_no_swap="", lost_ns=10 * SWAP_NS)
    for confirmed in ("", "processor", "unknown"):
        assert remedy(replace(facts, confirmed=confirmed)).rung == "swap"
    known = remedy(replace(facts, confirmed="program"))
    assert known.rung != "swap" and "the program has more to do there" in known.why
    asked = remedy(replace(facts, confirmed="asked"))
    assert asked.rung != "swap" and "fixed work has not said yet" in asked.why
    other = replace(facts, confirmed="program", why_no_swap="the job has one node")
    assert "no swap for a spare: the job has one node" in remedy(other).why


@pytest.mark.parametrize("seconds", [2, 300])
def test_a_swap_costs_what_this_run_has_measured_and_it_says_so(seconds: int) -> None:
    price = SwapPrice(seconds * S_NS, "measured: 2 restarts of this run in the middle")
    facts = replace(FACTS, why_no_swap="", swap=price)
    early = remedy(replace(facts, lost_ns=price.ns - 1))
    assert early.rung != "swap"
    assert f"before {seconds}.00 s are lost, which is what one costs (measured: 2" in early.why
    late = remedy(replace(facts, lost_ns=price.ns))
    assert late.rung == "swap" and f"about {seconds}.00 s once (measured: 2 rest" in late.why
    assumed = remedy(replace(FACTS, why_no_swap="", lost_ns=SWAP_NS)).why
    assert "about 60.00 s once (assumed: this run has measured none)" in assumed


def test_who_costs_nothing_any_more_is_not_swapped() -> None:
    even = dict.fromkeys(range(4), 10 * MS_NS)
    facts = replace(FACTS, costs_ns=even, total=28, why_no_swap="", lost_ns=10 * SWAP_NS)
    assert remedy(facts).rung == "rebalance"


def test_what_is_told_fits_a_line() -> None:
    causes = get_args(SlowCause)
    for section, cause, is_stage in product(JUDGED + PASSES, causes, (False, True)):
        slow = replace(
            SLOW,
            **{"rank": 10_239, "section": section, "cause": cause, "is_stage": is_stage},
            excess_ns=999 * MS_NS,
        )
        ways = (
            replace(FACTS, slow=slow),
            replace(FACTS, slow=slow, costs_ns={**COSTS, slow.rank: 20 * MS_NS}, total=28),
            replace(FACTS, slow=slow, computes_ratio=0.5),
            replace(FACTS, slow=slow, why_no_swap="", lost_ns=SWAP_NS),
        )
        for facts in ways:
            line = remedy(facts).line
            assert len(line) <= 120, line
            assert f"rank {slow.rank} is slow" in line and "+999.0 ms a step (100 %)" in line


def test_a_line_says_who_where_how_much_why_at_what_price_and_what_to_do() -> None:
    observed = "rank 2 is slow: compute +70.0 ms a step (100 %), it computes longer; observed: "
    assert remedy(FACTS).line == observed + "check clocks and heat"
    shared = remedy(replace(FACTS, costs_ns=COSTS, total=28)).line
    assert shared.endswith("; shared by speed, costs 10.0 ms")
    late = replace(SLOW, section=Section.BACKWARD, cause="neighbour")
    assert "backward pass" in remedy(replace(FACTS, slow=late)).line


@pytest.mark.parametrize("costs", [{}, COSTS])
def test_nobody_takes_work_from_a_stage_of_a_pipeline(costs: dict[int, int]) -> None:
    facts = replace(FACTS, slow=replace(SLOW, is_stage=True), costs_ns=costs, total=28)
    found = remedy(facts)
    assert (found.rung, found.left_ns) == ("observe", 70 * MS_NS)
    assert "job.micro_batches" not in found.why and "job.partial_sum" not in found.why
    assert "give its stage fewer layers" in found.why and "fewer layers" in found.line
    assert remedy(replace(facts, why_no_swap="", lost_ns=SWAP_NS)).rung == "swap"
