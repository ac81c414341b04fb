"""Expectation: how much of the time is training that lasts, under a policy on a cluster.

Comes in: a cluster, a policy, its placement and charges (`core/economics/costs.py`). Goes out:
rates and a ratio. Draws nothing: what `sim/economics/montecarlo.py` finds by trying is computed
here, exactly where failures are independent, and otherwise to first order:

* How much work lasts: each tier's exact ratio for the failures that go back to it
  (`Tier.lasting_ratio`), multiplied.
* How long all wait: recoveries that begin anew with each failure that strikes in them, e^(rate x
  duration).
* What exceeds memory: `survival_at` for the nodes lost within one recovery; for a rack, by losing
  each rack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from keepstep.core.economics.costs import Charges, ClusterPolicy
from keepstep.core.economics.spares import all_in_use, failures_per_s
from keepstep.core.redundancy.survival import out_of_reach, survival_at
from keepstep.model.cluster import Cluster, FailureKind, Scope
from keepstep.model.topology import Placement

MAX_EXPONENT = 500.0  # beyond e^500 nobody ever trains


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """What is asked about. `placement`: None where memory holds nothing."""

    cluster: Cluster
    policy: ClusterPolicy
    placement: Placement | None
    costs: Charges


def to_store_per_s(case: PolicyCase) -> dict[str, float]:
    """How often memory does not cover a failure, by the name of its kind."""
    rates = {kind.name: failures_per_s(case.cluster, kind) for kind in case.cluster.failures}
    if case.placement is None:
        return rates
    share = _shares_beyond_memory(case, case.placement)
    return {
        kind.name: rates[kind.name] * (1.0 if kind.latency_s else share[kind.scope])
        for kind in case.cluster.failures
    }


def effective_ratio(case: PolicyCase, to_store: Mapping[str, float]) -> float:
    """The part of the time that is training which lasts. `to_store`: from `to_store_per_s`."""
    costs = case.costs
    own_per_s = peers_per_s = waiting = 0.0
    latency = 1.0
    for kind in case.cluster.failures:
        rate = failures_per_s(case.cluster, kind)
        from_memory = rate - to_store[kind.name]
        if kind.replaces:
            peers_per_s += from_memory
        else:
            own_per_s += from_memory
        waiting += _waiting(case, kind, to_store[kind.name])
        latency *= max(0.0, 1 - rate * kind.latency_s)
    pace = costs.pace_ratio  # rates are by the clock, tiers count work
    lasting = costs.store.lasting_ratio(sum(to_store.values()) / pace) * latency
    if costs.own and costs.peers:
        lasting *= costs.own.lasting_ratio(own_per_s / pace)
        lasting *= costs.peers.lasting_ratio(peers_per_s / pace)
    return pace * lasting / (1 + waiting)


def _waiting(case: PolicyCase, kind: FailureKind, to_store_per_s: float) -> float:
    """Seconds for which all wait because of this kind, for each second of training."""
    total_per_s = sum(failures_per_s(case.cluster, each) for each in case.cluster.failures)
    from_memory_per_s = failures_per_s(case.cluster, kind) - to_store_per_s
    tier = case.costs.peers if kind.replaces else case.costs.own
    fixed_s = _recovery_s(case, kind)
    waiting = 0.0
    for rate, fetch_s in (
        (to_store_per_s, case.costs.store.fetch_s),
        (from_memory_per_s, tier.fetch_s if tier else 0.0),
    ):
        if rate:
            exponent = min(MAX_EXPONENT, total_per_s * (fixed_s + fetch_s))
            waiting += rate / total_per_s * math.expm1(exponent)
    return waiting


def _recovery_s(case: PolicyCase, kind: FailureKind) -> float:
    """From the failure until all train again, without fetching."""
    cluster = case.cluster
    detected_s = cluster.detection_s if kind.detection_s is None else kind.detection_s
    waited_s = 0.0
    if kind.replaces:
        spare_nodes = cluster.spares if case.policy.spares is None else case.policy.spares
        # When the spares are out, the first of the replacements on their way ends the wait.
        first_s = cluster.replacement_s / (spare_nodes + 1)
        waited_s = all_in_use(cluster, spare_nodes) * first_s
    return detected_s + waited_s + case.costs.restart_s


def _shares_beyond_memory(case: PolicyCase, placement: Placement) -> dict[Scope, float]:
    """Of the failures of each scope, the share that memory does not cover."""
    together = _lost_together(case, placement)
    has_racks = any(kind.scope is Scope.RACK for kind in case.cluster.failures)
    racks = _racks_beyond_memory(case.cluster, placement) if has_racks else 0.0
    return {
        Scope.RANK: 0.0,
        Scope.DEVICE: together,
        Scope.NODE: together,
        Scope.RACK: max(together, racks),
    }


def _lost_together(case: PolicyCase, placement: Placement) -> float:
    """Of lost nodes, the share that finds another one of its group lost already: within one
    recovery, and until everything is redundant again."""
    if any(group.tolerates == 0 for group in placement.groups):
        return 1.0
    cluster = case.cluster
    costs = case.costs
    replaced = [kind for kind in cluster.failures if kind.replaces]
    single = [kind for kind in replaced if kind.scope is not Scope.RACK]
    loss_per_s = sum(failures_per_s(cluster, kind) for kind in single)
    longest_s = max((_recovery_s(case, kind) for kind in replaced), default=0.0)
    window_s = longest_s + costs.redundant_s + (costs.peers.fetch_s if costs.peers else 0.0)
    if loss_per_s == 0 or window_s == 0:
        return 0.0
    node_survives = math.exp(-loss_per_s / cluster.nodes * window_s)
    lost = 1 - survival_at(placement.groups, node_survives)
    return min(1.0, lost / window_s / loss_per_s)


def _racks_beyond_memory(cluster: Cluster, placement: Placement) -> float:
    """Share of the racks whose loss alone takes a snapshot with it."""
    group_of = {node: group for group in placement.groups for node in group.members}
    starts = range(0, cluster.nodes, cluster.nodes_per_rack)
    fatal = 0
    for start in starts:
        gone = cluster.rack_of(start)
        touched = replace(placement, groups=tuple({group_of[node] for node in gone}))
        fatal += bool(out_of_reach(touched, touched.holders, gone))
    return fatal / len(starts)
