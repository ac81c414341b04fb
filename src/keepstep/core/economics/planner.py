"""Planner: which policy a cluster deserves.

Comes in: a cluster. Goes out: a plan: copies or parity, how often a checkpoint, how many spares,
how much memory. It compares lasting work per *paid* node, idle spares among them; of what is as
good to 0.05 % it takes the simpler. What to expect of a policy is computed in `expectation.py`; why
a plan is what it is, is said in `plan_reasons.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from keepstep.core.economics.costs import (
    ClusterPolicy,
    charges,
    persist_stall_s,
    plain_stall_s,
)
from keepstep.core.economics.expectation import PolicyCase, effective_ratio, to_store_per_s
from keepstep.core.economics.intervals import daly, optimal, with_silent_errors, young
from keepstep.core.economics.spares import spares
from keepstep.core.redundancy.placement import CANDIDATES, place
from keepstep.errors import ConfigError
from keepstep.model.cluster import DAY_S, Cluster
from keepstep.model.topology import NoRedundancy, Placement

AS_GOOD_RATIO = 0.0005
# Checkpoints that a store is asked to keep for silent errors. Where more lie within the time that
# an error may stay unnoticed, they are thinned out.
MAX_KEPT = 10
SPARES_QUANTILE = 0.99
MAX_INTERVAL_S = DAY_S


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds of work between checkpoints.

    young_s, daly_s, exact_s: what these formulas say. least_s: how long the store takes for one.
    chosen_s: what is recommended. kept_s: how far apart those may be that are kept for silent
    errors (every one, or thinned out). kept: how many those are.
    """

    young_s: float
    daly_s: float
    exact_s: float
    least_s: float
    chosen_s: float
    kept_s: float
    kept: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy and what to expect of it.

    effective_ratio: the part of the time that is training which lasts. value_ratio: the same per
    paid node, which is what is compared. memory_bytes: of a node. to_store_per_day: failures that
    memory does not cover.
    """

    policy: ClusterPolicy
    effective_ratio: float
    value_ratio: float
    memory_bytes: float
    to_store_per_day: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """What is recommended, and what it was compared with.

    refused: policies that cannot be, each with the reason. spares_p99: what suffices 99 % of the
    time, whether it pays or not.
    """

    cluster: Cluster
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    refused: Mapping[str, str]
    spares_p99: int


def plan(cluster: Cluster) -> PolicyPlan:
    """The plan for a cluster. Without redundancy and without spares there always is one."""
    p99 = spares(cluster, SPARES_QUANTILE)
    candidates: list[Candidate] = []
    refused: dict[str, str] = {}
    in_process = cluster.in_process_restart_s is not None
    for scheme in (*CANDIDATES, NoRedundancy(), None):
        try:
            placement = None if scheme is None else place(scheme, cluster.topology())
            for count in sorted({0, p99}):
                policy = ClusterPolicy(scheme, 0.0, in_process, count)
                candidates.append(_candidate(cluster, policy, placement))
        except ConfigError as error:
            refused[str(scheme)] = str(error)
    best = max(candidate.value_ratio for candidate in candidates)
    as_good = (each for each in candidates if each.value_ratio >= best - AS_GOOD_RATIO)
    return PolicyPlan(
        cluster=cluster,
        chosen=next(as_good),
        candidates=tuple(candidates),
        refused=refused,
        spares_p99=p99,
    )


def case_of(cluster: Cluster, policy: ClusterPolicy, placement: Placement | None) -> PolicyCase:
    """The policy with what it costs. Raises ConfigError when it does not fit into memory."""
    two_slots_ratio = placement.two_slots_ratio if placement else 0.0
    return PolicyCase(cluster, policy, placement, charges(cluster, policy, two_slots_ratio))


def _candidate(cluster: Cluster, policy: ClusterPolicy, placement: Placement | None) -> Candidate:
    """The policy with the best interval between its checkpoints."""
    first = case_of(cluster, policy, placement)
    to_store = to_store_per_s(first)
    interval = _interval(cluster, policy, sum(to_store.values()), first.costs.store.lag_s)
    settled = case_of(cluster, replace(policy, store_s=interval.chosen_s), placement)
    ratio = effective_ratio(settled, to_store)
    return Candidate(
        policy=settled.policy,
        effective_ratio=ratio,
        value_ratio=ratio * cluster.nodes / (cluster.nodes + (policy.spares or 0)),
        memory_bytes=settled.costs.memory_bytes,
        to_store_per_day=sum(to_store.values()) * DAY_S,
        interval=interval,
    )


def _interval(
    cluster: Cluster, policy: ClusterPolicy, to_store_per_s: float, least_s: float
) -> Interval:
    stall_s = plain_stall_s(cluster) if policy.scheme is None else persist_stall_s(cluster)
    mtbf_s = 1 / to_store_per_s if to_store_per_s > 0 else math.inf
    if mtbf_s > MAX_INTERVAL_S * 1000:
        return _daily(least_s)
    exact_s = optimal(stall_s, mtbf_s)
    wanted_s = min(max(exact_s, least_s, cluster.iteration_s), MAX_INTERVAL_S)
    chosen_s = max(least_s, _round_up(wanted_s))
    latency_s = unnoticed_s(cluster)
    # An interval that loses nothing but by its length: the same optimum, bounded by what the
    # checkpoints kept must reach back.
    kept_s = max(chosen_s, with_silent_errors(stall_s, mtbf_s, math.inf, latency_s, MAX_KEPT))
    return Interval(
        young_s=young(stall_s, mtbf_s),
        daly_s=daly(stall_s, mtbf_s),
        exact_s=exact_s,
        least_s=least_s,
        chosen_s=chosen_s,
        kept_s=kept_s,
        kept=1 + max(1, math.ceil(latency_s / kept_s)),
    )


def _daily(least_s: float) -> Interval:
    """Memory covers everything: a checkpoint a day, for other purposes."""
    day_s = max(DAY_S, least_s)
    return Interval(
        young_s=math.inf,
        daly_s=math.inf,
        exact_s=math.inf,
        least_s=least_s,
        chosen_s=day_s,
        kept_s=day_s,
        kept=2,
    )


def _round_up(seconds: float) -> float:
    """To whole minutes, or to seconds below two minutes: as people say it."""
    unit = 60 if seconds > 120 else 1
    return float(math.ceil(seconds / unit) * unit)


def unnoticed_s(cluster: Cluster) -> float:
    """How long the state may be wrong before anybody notices."""
    return max((kind.latency_s for kind in cluster.failures if kind.per_node_day > 0), default=0.0)
