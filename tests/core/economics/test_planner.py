"""Planning: what it computes against what simulation finds, its parts against counting, and what it
says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

import pytest

from keepstep.core.economics.costs import ClusterPolicy, parse_cluster_policy
from keepstep.core.economics.expectation import effective_ratio, to_store_per_s
from keepstep.core.economics.plan_reasons import reasons
from keepstep.core.economics.planner import AS_GOOD_RATIO, PolicyPlan, case_of, plan
from keepstep.core.redundancy.placement import place
from keepstep.errors import ConfigError
from keepstep.model.cluster import Cluster, FailureKind, Scope
from keepstep.model.topology import Copies
from keepstep.sim.economics.confidence import student
from keepstep.sim.economics.montecarlo import prepare, run
from keepstep.sim.economics.presets import PRESETS

SEEDS, DAYS = 6, 30.0
HARSH = replace(
    PRESETS["llama3-16384"], name="harsh", nodes=256, state_bytes=405e9, iteration_s=20.0
)
HARSH = replace(
    HARSH,
    failures=tuple(replace(kind, per_node_day=20 * kind.per_node_day) for kind in HARSH.failures),
)
CLUSTERS = [PRESETS["p4d-16"], PRESETS["p4d-1000"], PRESETS["llama3-16384"], HARSH]
PLANS: dict[str, PolicyPlan] = {}
VALUES: dict[str, dict[str, list[float]]] = {}


def planned(cluster: Cluster) -> PolicyPlan:
    if cluster.name not in PLANS:
        PLANS[cluster.name] = plan(cluster)
    return PLANS[cluster.name]


def expected_ratio(cluster: Cluster, policy: ClusterPolicy) -> float:
    placement = None if policy.scheme is None else place(policy.scheme, cluster.topology())
    case = case_of(cluster, policy, placement)
    return effective_ratio(case, to_store_per_s(case))


def simulated(cluster: Cluster) -> dict[str, list[float]]:
    """Of every candidate the effective ratio of each seed."""
    if cluster.name not in VALUES:
        cases = [prepare(cluster, candidate.policy) for candidate in planned(cluster).candidates]
        found = run(cluster, cases, DAYS, SEEDS)
        VALUES[cluster.name] = {
            case.name: [o.effective_ratio for o in each]
            for case, each in zip(cases, found, strict=True)
        }
    return VALUES[cluster.name]


def half_width(values: Sequence[float]) -> float:
    return student(len(values) - 1, 0.9995) * stdev(values) / math.sqrt(len(values))


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.name)
def test_what_is_recommended_is_within_noise_of_the_best_that_simulation_finds(
    cluster: Cluster,
) -> None:
    found, ratios = planned(cluster), simulated(cluster)
    paid = {
        str(c.policy): cluster.nodes / (cluster.nodes + (c.policy.spares or 0))
        for c in found.candidates
    }
    mine = str(found.chosen.policy)
    for other, theirs in ratios.items():
        # On the same failures: the differences say more than two means do.
        ahead = [
            paid[other] * b - paid[mine] * a for a, b in zip(ratios[mine], theirs, strict=True)
        ]
        assert fmean(ahead) <= 2 * AS_GOOD_RATIO + half_width(ahead), (
            f"{other} is better than {mine} by {fmean(ahead):.4f}"
        )


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.name)
def test_the_expected_ratio_is_the_simulated_mean(cluster: Cluster) -> None:
    for candidate in planned(cluster).candidates:
        ratios = simulated(cluster)[str(candidate.policy)]
        tolerance = 0.01 + half_width(ratios)
        assert abs(candidate.effective_ratio - fmean(ratios)) < tolerance, (
            str(candidate.policy),
            candidate.effective_ratio,
            fmean(ratios),
        )


SILENT = (FailureKind("silent", Scope.RANK, 0.3, latency_s=3600.0),)


@pytest.mark.parametrize(
    ("cluster", "policy"),
    [
        (PRESETS["p4d-1000"], "store:max"),  # saving holds up a seventh of the time
        (PRESETS["p4d-1000"], "store:20m"),
        # a fifth of the time is wrong
        (replace(PRESETS["p4d-16"], failures=SILENT), "copies:2/store:20m"),
        (replace(PRESETS["p4d-16"], failures=SILENT), "store:20m"),
        (PRESETS["llama3-16384"], "copies:2"),
        (PRESETS["gpus-100k"], "store:max"),
    ],
)
def test_the_expected_ratio_where_one_part_of_it_is_large(cluster: Cluster, policy: str) -> None:
    protection = parse_cluster_policy(policy)
    (found,) = run(cluster, [prepare(cluster, protection)], 60.0, 20)
    ratios = [outcome.effective_ratio for outcome in found]
    assert abs(expected_ratio(cluster, protection) - fmean(ratios)) < 0.005 + half_width(ratios)


def test_racks_apart_leave_the_store_to_silent_errors() -> None:
    of_copies = next(
        c for c in planned(PRESETS["llama3-16384"]).candidates if c.policy.scheme == Copies(2)
    )
    silent_per_day = 6 / 54
    assert silent_per_day <= of_copies.to_store_per_day < silent_per_day * 1.05


def test_a_spare_that_would_help_but_costs_more_is_not_taken() -> None:
    few = replace(PRESETS["p4d-16"], nodes=4, replacement_s=6 * 3600.0)
    found = plan(few)
    with_spare = next(
        c
        for c in found.candidates
        if c.policy.spares == found.spares_p99 and c.policy.scheme == found.chosen.policy.scheme
    )
    assert found.spares_p99 == 1 and found.chosen.policy.spares == 0
    assert with_spare.effective_ratio > found.chosen.effective_ratio + 0.01


def test_no_store_interval_nearby_is_better() -> None:
    cluster = PRESETS["p4d-1000"]
    only_store = next(c for c in planned(cluster).candidates if c.policy.scheme is None)
    best = only_store.effective_ratio
    for factor in (0.25, 0.5, 0.8, 1.25, 2, 4):
        other = replace(only_store.policy, store_s=only_store.policy.store_s * factor)
        assert expected_ratio(cluster, other) <= best + 0.001


def test_nothing_fails_nothing_is_needed() -> None:
    never = replace(PRESETS["p4d-16"], failures=())
    found = plan(never)
    assert (
        found.spares_p99 == 0
        and found.chosen.effective_ratio > 0.9999
        and "never fail" in reasons(found)[0]
    )


def test_what_cannot_be_is_refused_with_the_reason_and_the_rest_compared() -> None:
    tight = replace(PRESETS["p4d-16"], memory_bytes=200e9)
    found = plan(tight)
    assert "expected at most 186.3 GiB a node" in found.refused["copies:2"]
    assert str(found.chosen.policy.scheme) in ("parity:3", "parity:4", "parity:8")
    assert any(sentence.startswith("Not copies:2: ") for sentence in reasons(found))


def test_when_nothing_fits_the_store_remains() -> None:
    found = plan(replace(PRESETS["p4d-16"], memory_bytes=1e9))
    assert (
        found.chosen.policy.scheme is None
        and found.chosen.memory_bytes == 0
        and "none" in found.refused
    )


def test_copies_that_are_as_good_are_preferred_and_spares_that_do_not_pay_are_not_taken() -> None:
    found = planned(PRESETS["p4d-16"])
    assert found.chosen.policy.scheme == Copies(2) and found.chosen.policy.spares == 0
    assert planned(PRESETS["p4d-1000"]).chosen.policy.spares == 1


def test_silent_errors_ask_for_old_checkpoints() -> None:
    found = planned(PRESETS["llama3-16384"])
    interval = found.chosen.interval
    assert interval.kept_s * (interval.kept - 1) >= 3600, (
        "the oldest is older than an error stays unnoticed"
    )
    assert interval.chosen_s == pytest.approx(interval.exact_s, rel=0.05)
    assert any("silent error stays unnoticed for 60 min" in sentence for sentence in reasons(found))


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.name)
def test_it_says_why_in_a_dozen_lines(cluster: Cluster) -> None:
    why = reasons(planned(cluster))
    assert 6 <= len(why) <= 14 and all(
        sentence.endswith(".") and len(sentence) < 200 for sentence in why
    )
    assert str(planned(cluster).chosen.policy) in why[1]


def test_plans_are_the_same_twice() -> None:
    assert plan(PRESETS["p4d-1000"]) == plan(PRESETS["p4d-1000"])


def test_racks_that_cannot_be_kept_apart_refuse_copies() -> None:
    one_rack = replace(PRESETS["p4d-16"], nodes_per_rack=16)
    found = plan(one_rack)
    assert "racks" in found.refused["copies:2"] and found.chosen.policy.scheme != Copies(2)


def test_a_policy_that_needs_more_nodes_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="expected at least 10 nodes, found 4"):
        expected_ratio(replace(PRESETS["p4d-16"], nodes=4), parse_cluster_policy("rs:8+2"))
