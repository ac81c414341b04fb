"""Planning: which policy a cluster deserves, and why.

Comes in: a cluster. Goes out: a Plan: copies or parity, how often a checkpoint, how many spares,
memory, and a dozen sentences. Draws nothing: what `sim/economics/montecarlo.py` finds by trying is
computed here, exactly where failures are independent and otherwise to first order:

* How much work lasts: each tier's exact ratio for the failures that go back to it
  (`Tier.lasting_ratio`), multiplied.
* How long all wait: recoveries that begin anew with each failure that strikes in them, e^(rate x
  duration).
* What exceeds memory: `core.survival.survival_at` for the nodes lost within one recovery; for a
  rack, by losing each rack.
* Spares: the 99th percentile of the nodes being replaced at once, a compound Poisson distribution
  because racks take several.

What it compares is lasting work per *paid* node, idle spares among them; of what is as good to
0.05 % it takes the simpler.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from keepstep.core.economics.costs import (
    Charges,
    Protection,
    charges,
    human_interval,
    persist_stall_s,
    plain_stall_s,
)
from keepstep.core.economics.intervals import daly, optimal, with_silent_errors, young
from keepstep.core.redundancy.placement import CANDIDATES, place
from keepstep.core.redundancy.survival import out_of_reach, survival_at
from keepstep.errors import ConfigError
from keepstep.model.cluster import DAY_S, Cluster, FailureKind, Scope
from keepstep.model.topology import NoRedundancy, Placement
from keepstep.model.units import human_bytes

AS_GOOD_RATIO = 0.0005
# checkpoints a store is asked to keep for silent errors; where more lie in their latency, thinned
MOST_KEPT = 10
SPARES_QUANTILE = 0.99


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds of work between checkpoints. `least_s`: the store takes so long for one. `kept_s`:
    how far apart those may be that are kept for silent errors (every one, or thinned out), and how
    many: `kept`."""

    young_s: float
    daly_s: float
    exact_s: float
    least_s: float
    chosen_s: float
    kept_s: float
    kept: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """`value_ratio`: lasting work per paid node, the one compared. `to_store_per_day`: failures
    that memory does not cover."""

    policy: Protection
    effective_ratio: float
    value_ratio: float
    memory_bytes: float
    to_store_per_day: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class Plan:
    """`refused`: policies that cannot be, each with the reason. `spares_p99`: what 99 % of the time
    suffices, whether it pays or not."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    refused: Mapping[str, str]
    spares_p99: int
    why: tuple[str, ...]


def plan(cluster: Cluster) -> Plan:
    """Raises ConfigError when nothing can be done at all."""
    p99 = spares(cluster, SPARES_QUANTILE)
    candidates: list[Candidate] = []
    refused: dict[str, str] = {}
    in_process = cluster.in_process_restart_s is not None
    for scheme in (*CANDIDATES, NoRedundancy(), None):
        try:
            placement = None if scheme is None else place(scheme, cluster.topology())
            for count in sorted({0, p99}):
                candidates.append(
                    _candidate(cluster, Protection(scheme, 0.0, in_process, count), placement)
                )
        except ConfigError as error:
            refused[str(scheme)] = str(error)
    best = max(candidate.value_ratio for candidate in candidates)
    chosen = next(
        candidate for candidate in candidates if candidate.value_ratio >= best - AS_GOOD_RATIO
    )
    return Plan(
        chosen, tuple(candidates), refused, p99, _why(cluster, chosen, candidates, refused, p99)
    )


def spares(cluster: Cluster, quantile: float) -> int:
    """So many nodes are being replaced at once at most, with this probability: each failure's nodes
    for `replacement_s`."""
    return next(
        count
        for count, reached in enumerate(_cumulative(_replaced_at_once(cluster)))
        if reached >= quantile
    )


def _replaced_at_once(cluster: Cluster) -> dict[int, float]:
    """Mean number of events whose nodes are being replaced, by how many nodes an event takes."""
    means: dict[int, float] = {}
    for kind in cluster.failures:
        if kind.replaces:
            size = cluster.nodes_per_rack if kind.scope is Scope.RACK else 1
            means[size] = means.get(size, 0.0) + _per_s(cluster, kind) * cluster.replacement_s
    return means


def _cumulative(means: Mapping[int, float]) -> Iterable[float]:
    """P(at most 0, 1, 2, .. nodes) when events that take `size` nodes are Poisson with these means
    (Panjer's recursion)."""
    total = sum(means.values())
    # Carried as multiples of a growing unit: e^-total alone is no float beyond 745.
    chances, log_unit, reached = [1.0], -total, math.exp(-total)
    yield reached
    while True:
        count = len(chances)
        chance = (
            sum(
                size * mean * chances[count - size] for size, mean in means.items() if size <= count
            )
            / count
        )
        if chance > 1e200:
            chances, chance, log_unit = (
                [each * 1e-200 for each in chances],
                chance * 1e-200,
                log_unit + math.log(1e200),
            )
        chances.append(chance)
        reached += math.exp(log_unit + math.log(chance)) if chance > 0 else 0.0
        yield min(reached, 1.0) if count < 20 * (total + 10) * max(means, default=1) else 1.0


def _candidate(cluster: Cluster, policy: Protection, placement: Placement | None) -> Candidate:
    two_slots_ratio = placement.two_slots_ratio if placement else 0.0
    first = charges(cluster, policy, two_slots_ratio)
    to_store = _to_store(cluster, policy, placement, first)
    interval = _interval(cluster, policy, sum(to_store.values()), first.store.lag_s)
    settled = replace(policy, store_s=interval.chosen_s)
    costs = charges(cluster, settled, two_slots_ratio)
    ratio = _expected(cluster, settled, costs, to_store)
    paid = cluster.nodes / (cluster.nodes + (policy.spares or 0))
    return Candidate(
        settled, ratio, ratio * paid, costs.memory_bytes, sum(to_store.values()) * DAY_S, interval
    )


def expected_ratio(cluster: Cluster, policy: Protection) -> float:
    """Effective training time ratio to expect. Raises ConfigError."""
    placement = None if policy.scheme is None else place(policy.scheme, cluster.topology())
    costs = charges(cluster, policy, placement.two_slots_ratio if placement else 0.0)
    return _expected(cluster, policy, costs, _to_store(cluster, policy, placement, costs))


def _expected(
    cluster: Cluster, policy: Protection, costs: Charges, to_store: Mapping[str, float]
) -> float:
    own = peers = waiting = 0.0
    total = sum(_per_s(cluster, kind) for kind in cluster.failures)
    latency = 1.0
    for kind in cluster.failures:
        rate, store = _per_s(cluster, kind), to_store[kind.name]
        tier = costs.peers if kind.replaces else costs.own
        own, peers = (
            own + (rate - store) * (not kind.replaces),
            peers + (rate - store) * kind.replaces,
        )
        fixed_s = _recovery_s(cluster, policy, kind, costs)
        for share, fetch_s in (
            (store, costs.store.fetch_s),
            (rate - store, tier.fetch_s if tier else 0.0),
        ):
            # Beyond e^500 nobody ever trains.
            waiting += (
                share / total * math.expm1(min(500.0, total * (fixed_s + fetch_s)))
                if share
                else 0.0
            )
        latency *= max(0.0, 1 - rate * kind.latency_s)
    pace = costs.pace_ratio  # rates are by the clock, tiers count work
    lasting = costs.store.lasting_ratio(sum(to_store.values()) / pace) * latency
    if costs.own and costs.peers:
        lasting *= costs.own.lasting_ratio(own / pace) * costs.peers.lasting_ratio(peers / pace)
    return pace * lasting / (1 + waiting)


def _recovery_s(cluster: Cluster, policy: Protection, kind: FailureKind, costs: Charges) -> float:
    """Until all train again, without fetching."""
    detected_s = cluster.detection_s if kind.detection_s is None else kind.detection_s
    waited_s = 0.0
    if kind.replaces:
        count = cluster.spares if policy.spares is None else policy.spares
        # When the spares are out, the first of the replacements on their way ends the wait.
        waited_s = _all_out(cluster, count) * cluster.replacement_s / (count + 1)
    return detected_s + waited_s + costs.restart_s


@cache
def _all_out(cluster: Cluster, count: int) -> float:
    """Probability that a failure finds every spare in use."""
    if count == 0:
        return 1.0
    return 1 - next(
        reached
        for number, reached in enumerate(_cumulative(_replaced_at_once(cluster)))
        if number == count - 1
    )


def _to_store(
    cluster: Cluster, policy: Protection, placement: Placement | None, costs: Charges
) -> dict[str, float]:
    """Failures per second, by kind, that memory does not cover."""
    rates = {kind.name: _per_s(cluster, kind) for kind in cluster.failures}
    if placement is None:
        return rates
    node_loss = sum(
        rates[kind.name]
        for kind in cluster.failures
        if kind.replaces and kind.scope is not Scope.RACK
    )
    together = _beyond_memory(cluster, policy, placement, costs, node_loss)
    covered = {Scope.RANK: 0.0, Scope.DEVICE: together, Scope.NODE: together, Scope.RACK: together}
    if any(kind.scope is Scope.RACK for kind in cluster.failures):
        covered[Scope.RACK] = max(together, _racks_beyond_memory(cluster, placement))
    return {
        kind.name: rates[kind.name] * (1.0 if kind.latency_s else covered[kind.scope])
        for kind in cluster.failures
    }


def _beyond_memory(
    cluster: Cluster, policy: Protection, placement: Placement, costs: Charges, node_loss: float
) -> float:
    """Of lost nodes, the share that finds another of its group lost already: within one recovery
    and until all is redundant again."""
    if any(group.tolerates == 0 for group in placement.groups):
        return 1.0
    longest_s = max(
        (_recovery_s(cluster, policy, kind, costs) for kind in cluster.failures if kind.replaces),
        default=0.0,
    )
    window_s = longest_s + costs.redundant_s + (costs.peers.fetch_s if costs.peers else 0.0)
    if node_loss == 0 or window_s == 0:
        return 0.0
    lost = 1 - survival_at(placement.groups, math.exp(-node_loss / cluster.nodes * window_s))
    return min(1.0, lost / window_s / node_loss)


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


def _interval(cluster: Cluster, policy: Protection, to_store: float, least_s: float) -> Interval:
    stall_s = plain_stall_s(cluster) if policy.scheme is None else persist_stall_s(cluster)
    mtbf_s = 1 / to_store if to_store > 0 else math.inf
    # memory covers everything: a checkpoint a day, for other purposes
    if mtbf_s > MOST_INTERVAL_S * 1000:
        day_s = max(DAY_S, least_s)
        return Interval(math.inf, math.inf, math.inf, least_s, day_s, day_s, 2)
    exact_s = optimal(stall_s, mtbf_s)
    chosen_s = max(
        least_s, _round(min(max(exact_s, least_s, cluster.iteration_s), MOST_INTERVAL_S))
    )
    latency_s = _latency_s(cluster)
    # An interval that loses nothing but by its length: the same optimum, bounded by what the
    # checkpoints kept must reach back.
    kept_s = max(chosen_s, with_silent_errors(stall_s, mtbf_s, math.inf, latency_s, MOST_KEPT))
    return Interval(
        young(stall_s, mtbf_s),
        daly(stall_s, mtbf_s),
        exact_s,
        least_s,
        chosen_s,
        kept_s,
        1 + max(1, math.ceil(latency_s / kept_s)),
    )


MOST_INTERVAL_S = DAY_S


def _round(seconds: float) -> float:
    """As people say it: up to whole minutes, or seconds below two minutes."""
    unit = 60 if seconds > 120 else 1
    return float(math.ceil(seconds / unit) * unit)


def _per_s(cluster: Cluster, kind: FailureKind) -> float:
    return kind.per_node_day * cluster.nodes / DAY_S


def _latency_s(cluster: Cluster) -> float:
    """How long the state may be wrong before anybody notices."""
    return max((kind.latency_s for kind in cluster.failures if kind.per_node_day > 0), default=0.0)


def _why(
    cluster: Cluster,
    chosen: Candidate,
    candidates: list[Candidate],
    refused: Mapping[str, str],
    p99: int,
) -> tuple[str, ...]:
    return tuple(
        sentence for sentence in _sentences(cluster, chosen, candidates, refused, p99) if sentence
    )


def _sentences(
    cluster: Cluster,
    chosen: Candidate,
    candidates: list[Candidate],
    refused: Mapping[str, str],
    p99: int,
) -> Iterable[str]:
    policy, interval = chosen.policy, chosen.interval
    per_day = cluster.failures_per_day
    often = (
        f"fail {per_day:.3g} times a day: every {_span(DAY_S / per_day)}"
        if per_day
        else "never fail"
    )
    yield f"{cluster.nodes:,} nodes of {cluster.gpus_per_node} GPUs {often}."
    yield (
        f"{policy}: {chosen.effective_ratio:.2%} of the time is training that lasts, "
        f"{chosen.value_ratio:.2%} of the nodes paid for."
    )
    yield _compared(
        "Only the store",
        [c for c in candidates if c.policy.scheme is None and c.policy.spares == policy.spares],
    )
    for scheme in ("copies:2", "parity:4", "copies:3"):
        others = [
            c
            for c in candidates
            if str(c.policy.scheme) == scheme and c.policy.scheme != policy.scheme
        ]
        yield _compared(
            f"Instead {scheme}", [c for c in others if c.policy.spares == policy.spares]
        )
    if policy.scheme is not None:
        yield (
            f"Memory: {human_bytes(int(chosen.memory_bytes))} a node of "
            f"{human_bytes(int(cluster.memory_bytes))}, two generations of "
            f"{human_bytes(int(cluster.node_bytes))} of state and what is held for others."
        )
        often = (
            f"once in {_span(DAY_S / chosen.to_store_per_day)}"
            if chosen.to_store_per_day > 1e-4
            else "practically never"
        )
        yield (
            f"The store is needed {often}: lost together within one recovery, or noticed too late."
        )
    yield _interval_sentence(interval)
    latency_s = _latency_s(cluster)
    if latency_s:
        apart = (
            "" if interval.kept_s <= interval.chosen_s else f", one every {_span(interval.kept_s)}"
        )
        silent = (
            f"a silent error stays unnoticed for {_span(latency_s)}, and the oldest must be older"
        )
        yield f"Keep {interval.kept} checkpoints{apart}: {silent}."
    yield _spares_sentence(cluster, chosen, candidates, p99)
    if policy.in_process:
        yield (
            f"In-process recovery: {cluster.in_process_restart_s:g} s instead of "
            f"{cluster.restart_s:g} s until all train again."
        )
    for name, reason in list(refused.items())[:3]:
        yield f"Not {name}: {reason}."


def _compared(words: str, others: list[Candidate]) -> str:
    if not others:
        return ""
    other = others[0]
    if other.policy.scheme is None:
        return (
            f"{words}, every {human_interval(other.policy.store_s)}: {other.effective_ratio:.2%}."
        )
    return (
        f"{words}: {other.effective_ratio:.2%}, with {human_bytes(int(other.memory_bytes))} a node."
    )


def _interval_sentence(interval: Interval) -> str:
    chosen = (
        human_interval(interval.chosen_s) if interval.chosen_s >= 120 else f"{interval.chosen_s:g}s"
    )
    if math.isinf(interval.exact_s):
        return (
            f"Checkpoint every {chosen}: memory covers every failure expected here; the store is "
            "the last resort."
        )
    return (
        f"Checkpoint every {chosen} of work: Young {_span(interval.young_s)}, Daly "
        f"{_span(interval.daly_s)}, exactly "
        f"{_span(interval.exact_s)}; the store takes {_span(interval.least_s)} for one."
    )


def _spares_sentence(
    cluster: Cluster, chosen: Candidate, candidates: list[Candidate], p99: int
) -> str:
    words = (
        f"{p99} spare{'' if p99 == 1 else 's'} would do 99 % of the time, a replacement taking "
        f"{_span(cluster.replacement_s)}"
    )
    other = [
        c
        for c in candidates
        if c.policy.scheme == chosen.policy.scheme and c.policy.spares != chosen.policy.spares
    ]
    if p99 == 0:
        return (
            "Spares: none: 99 % of the time nothing is being replaced, which takes "
            f"{_span(cluster.replacement_s)}."
        )
    pays = (
        f"{chosen.value_ratio:.2%} of what is paid for lasts, against {other[0].value_ratio:.2%} "
        f"with {other[0].policy.spares}"
    )
    return f"Spares: {chosen.policy.spares}; {words}; {pays}."


def _span(seconds: float) -> str:
    """`3.2 h`: for a sentence."""
    for unit, size in (("days", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return (
                f"{seconds / size:,.0f} {unit}"
                if seconds >= 1000 * size
                else f"{seconds / size:.3g} {unit}"
            )
    return f"{seconds:.3g} s"
