"""Expectation: rates and ratios within their bounds, and worse where more fails. What it computes
against what simulation finds: `test_planner.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.economics.costs import parse_cluster_policy
from keepstep.core.economics.expectation import PolicyCase, effective_ratio, to_store_per_s
from keepstep.core.economics.planner import case_of
from keepstep.core.economics.spares import failures_per_s
from keepstep.core.redundancy.placement import place
from keepstep.model.cluster import Cluster, FailureKind, Scope
from keepstep.sim.economics.presets import PRESETS

NAMES = st.sampled_from(["p4d-16", "p4d-1000"])
POLICIES = st.sampled_from(["store:1h", "copies:2/store:1h", "copies:3/store:3h", "parity:4"])
FACTORS = st.floats(0.01, 30)


def harsher(name: str, factor: float) -> Cluster:
    """A cluster in which everything fails that much more often."""
    cluster = PRESETS[name]
    kinds = (replace(k, per_node_day=factor * k.per_node_day) for k in cluster.failures)
    return replace(cluster, failures=tuple(kinds))


def case(name: str, policy: str, factor: float) -> PolicyCase:
    cluster = harsher(name, factor)
    parsed = parse_cluster_policy(policy)
    placement = None if parsed.scheme is None else place(parsed.scheme, cluster.topology())
    return case_of(cluster, parsed, placement)


def ratio(found: PolicyCase) -> float:
    return effective_ratio(found, to_store_per_s(found))


@given(NAMES, POLICIES, FACTORS)
def test_the_store_is_needed_for_some_of_the_failures_and_without_memory_for_all(
    name: str, policy: str, factor: float
) -> None:
    found = case(name, policy, factor)
    rates = to_store_per_s(found)
    for kind in found.cluster.failures:
        rate = failures_per_s(found.cluster, kind)
        assert 0 <= rates[kind.name] <= rate
        if found.placement is None or kind.latency_s:
            assert rates[kind.name] == rate
    memory_covers = sum(rates.values()) < sum(
        failures_per_s(found.cluster, kind) for kind in found.cluster.failures
    )
    assert memory_covers == (found.placement is not None)


@given(NAMES, POLICIES, FACTORS, st.floats(1.5, 10))
def test_what_lasts_is_less_where_more_fails_and_never_more_than_the_pace(
    name: str, policy: str, factor: float, more: float
) -> None:
    found = case(name, policy, factor)
    worse = case(name, policy, factor * more)
    assert 0 <= ratio(worse) < ratio(found) < found.costs.pace_ratio


@given(NAMES, FACTORS)
def test_a_third_copy_keeps_more_from_the_store(name: str, factor: float) -> None:
    two, three = (
        sum(to_store_per_s(case(name, f"copies:{n}/store:1h", factor)).values()) for n in (2, 3)
    )
    assert three <= two


@pytest.mark.parametrize("policy", ["store:1h", "copies:2/store:1h"])
def test_where_nothing_fails_all_that_is_trained_lasts(policy: str) -> None:
    found = case("p4d-16", policy, 0.0)
    assert ratio(found) == found.costs.pace_ratio


@pytest.mark.parametrize("fatal", [0, 2, 4])
def test_a_rack_that_holds_all_copies_of_something_takes_it_to_the_store(fatal: int) -> None:
    """Of four racks of two nodes, in so many both nodes keep each other's copies."""
    rack = FailureKind("rack", Scope.RACK, 0.05)
    cluster = replace(PRESETS["p4d-16"], nodes=8, nodes_per_rack=2, failures=(rack,))
    policy = parse_cluster_policy("copies:2/store:1h")
    assert policy.scheme is not None
    apart = place(policy.scheme, cluster.topology())
    together = place(policy.scheme, replace(cluster, nodes_per_rack=1).topology())
    groups = [group for group in together.groups if max(group.members) < 2 * fatal]
    groups += [group for group in apart.groups if min(group.members) >= 2 * fatal]
    found = case_of(cluster, policy, replace(apart, groups=tuple(groups)))
    share = to_store_per_s(found)["rack"] / failures_per_s(cluster, rack)
    assert share == pytest.approx(fatal / 4, abs=0.01)
