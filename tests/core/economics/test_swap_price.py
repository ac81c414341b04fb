"""What a swap costs is what this run has measured, the nearest to a swap first, and it says so."""

from __future__ import annotations

from keepstep.core.economics.swap_price import ASSUMED, KEPT, LEAST_NS, SwapCosts
from keepstep.model.units import S_NS


def test_where_nothing_was_measured_it_is_assumed_and_says_so() -> None:
    price = SwapCosts().price
    assert price == ASSUMED and price.ns == 60 * S_NS and "assumed" in price.source


def test_restarts_come_before_what_a_restart_takes_at_least() -> None:
    costs = SwapCosts()
    costs.started(17 * S_NS)
    costs.started(5 * S_NS)
    assert costs.price.ns == costs.longest_start_ns == 17 * S_NS
    assert "took that to start" in costs.price.source
    costs.regrouped(2 * S_NS)
    assert costs.price.ns == 17 * S_NS, "a restart starts ranks, too"
    costs.regrouped(19 * S_NS)
    assert costs.price.ns == 19 * S_NS and "find together again" in costs.price.source
    costs.restarted(14 * S_NS)
    assert costs.price.ns == 14 * S_NS
    assert costs.price.source == "measured: 1 restart of this run"


def test_no_swap_costs_less_than_to_leave_and_to_meet() -> None:
    costs = SwapCosts()
    costs.restarted(S_NS // 10)
    assert costs.price.ns == LEAST_NS and costs.price.source.startswith("at least: ")


def test_of_several_restarts_the_middle_of_the_last_ones_counts() -> None:
    costs = SwapCosts()
    for seconds in (900, 900, 900, 10, 12, 11, 13, 600):
        costs.restarted(seconds * S_NS)
    assert costs.price.ns == 12 * S_NS
    assert costs.price.source == f"measured: {KEPT} restarts of this run in the middle"
