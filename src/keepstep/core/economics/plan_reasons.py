"""Why a plan is what it is, in a dozen sentences with their numbers.

Comes in: a plan. Goes out: text. Decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from keepstep.core.economics.costs import human_interval
from keepstep.core.economics.planner import Candidate, Interval, PolicyPlan, unnoticed_s
from keepstep.model.cluster import DAY_S, Cluster
from keepstep.model.units import human_bytes

COMPARED = ("copies:2", "parity:4", "copies:3")
MAX_REFUSED = 3
RARELY_PER_DAY = 1e-4


def reasons(plan: PolicyPlan) -> tuple[str, ...]:
    """The sentences, the most important first. The policy's name is in the second one."""
    return tuple(_sentences(plan))


def _sentences(plan: PolicyPlan) -> Iterator[str]:
    chosen = plan.chosen
    yield _failures(plan.cluster)
    yield (
        f"{chosen.policy}: {chosen.effective_ratio:.2%} of the time is training that lasts, "
        f"{chosen.value_ratio:.2%} of the nodes paid for."
    )
    yield from _comparisons(plan)
    if chosen.policy.scheme is not None:
        yield _memory(plan.cluster, chosen)
        yield _store(chosen)
    yield _checkpoints(chosen.interval)
    if unnoticed_s(plan.cluster):
        yield _kept(plan.cluster, chosen.interval)
    yield _spares(plan)
    if chosen.policy.in_process:
        yield (
            f"Recovery in the process: {plan.cluster.in_process_restart_s:g} s until all train "
            f"again, instead of {plan.cluster.restart_s:g} s."
        )
    for name, reason in list(plan.refused.items())[:MAX_REFUSED]:
        yield f"Not {name}: {reason}."


def _failures(cluster: Cluster) -> str:
    per_day = cluster.failures_per_day
    often = "never fail"
    if per_day:
        often = f"fail {per_day:.3g} times a day: every {_span(DAY_S / per_day)}"
    return f"{cluster.nodes:,} nodes of {cluster.gpus_per_node} GPUs {often}."


def _comparisons(plan: PolicyPlan) -> Iterator[str]:
    """With the same number of spares, and other redundancy."""
    policy = plan.chosen.policy
    same_spares = [each for each in plan.candidates if each.policy.spares == policy.spares]
    for each in same_spares:
        if each.policy.scheme is None:
            yield (
                f"Only the store, every {human_interval(each.policy.store_s)}: "
                f"{each.effective_ratio:.2%}."
            )
    for name in COMPARED:
        for each in same_spares:
            if str(each.policy.scheme) == name and each.policy.scheme != policy.scheme:
                memory = human_bytes(int(each.memory_bytes))
                yield f"Instead {name}: {each.effective_ratio:.2%}, with {memory} a node."


def _memory(cluster: Cluster, chosen: Candidate) -> str:
    return (
        f"Memory: {human_bytes(int(chosen.memory_bytes))} a node of "
        f"{human_bytes(int(cluster.memory_bytes))}: two generations of "
        f"{human_bytes(int(cluster.node_bytes))} of state, and what is held for other nodes."
    )


def _store(chosen: Candidate) -> str:
    often = "practically never"
    if chosen.to_store_per_day > RARELY_PER_DAY:
        often = f"once in {_span(DAY_S / chosen.to_store_per_day)}"
    return (
        f"The store is needed {often}: for nodes lost together within one recovery, and for errors "
        "noticed too late."
    )


def _checkpoints(interval: Interval) -> str:
    chosen = f"{interval.chosen_s:g}s"
    if interval.chosen_s >= 120:
        chosen = human_interval(interval.chosen_s)
    if math.isinf(interval.exact_s):
        return (
            f"Checkpoint every {chosen}: memory covers every failure expected here; the store is "
            "the last resort."
        )
    return (
        f"Checkpoint every {chosen} of work: Young {_span(interval.young_s)}, Daly "
        f"{_span(interval.daly_s)}, exactly {_span(interval.exact_s)}; the store takes "
        f"{_span(interval.least_s)} for one."
    )


def _kept(cluster: Cluster, interval: Interval) -> str:
    apart = ""
    if interval.kept_s > interval.chosen_s:
        apart = f", one every {_span(interval.kept_s)}"
    return (
        f"Keep {interval.kept} checkpoints{apart}: a silent error stays unnoticed for "
        f"{_span(unnoticed_s(cluster))}, and the oldest must be older."
    )


def _spares(plan: PolicyPlan) -> str:
    """What would do, what it brings, and so what is chosen."""
    replaced = _span(plan.cluster.replacement_s)
    if plan.spares_p99 == 0:
        return (
            f"Spares: none. A replacement takes {replaced}, and for 99 % of the time none is being "
            "waited for."
        )
    chosen = plan.chosen
    other = next(
        each
        for each in plan.candidates
        if each.policy.scheme == chosen.policy.scheme and each.policy.spares != chosen.policy.spares
    )
    plural = "" if plan.spares_p99 == 1 else "s"
    return (
        f"Spares: {chosen.policy.spares}; {plan.spares_p99} spare{plural} would do 99 % of the "
        f"time, a replacement taking {replaced}; {chosen.value_ratio:.2%} of what is paid for "
        f"lasts, against {other.value_ratio:.2%} with {other.policy.spares}."
    )


def _span(seconds: float) -> str:
    """`3.2 h`: for a sentence."""
    for unit, size in (("days", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            count = seconds / size
            return f"{count:,.0f} {unit}" if count >= 1000 else f"{count:.3g} {unit}"
    return f"{seconds:.3g} s"
