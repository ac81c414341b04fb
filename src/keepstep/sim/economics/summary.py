"""Summary: what all seeds say about a policy.

Comes in: outcomes. Goes out: one row a policy: means with confidence intervals, how the seeds are
spread, GPU-hours and money.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from keepstep.model.cluster import Cluster
from keepstep.sim.economics.confidence import mean_interval, share_interval
from keepstep.sim.economics.montecarlo import WalkOutcome


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the seeds: `low` to `high` holds its mean with 95 % confidence (None with one
    seed); the rest are the seeds' own."""

    mean: float
    low: float | None
    high: float | None
    least: float
    p10: float
    median: float
    p90: float
    most: float


@dataclass(frozen=True, slots=True)
class Row:
    """`gpu_hours` are paid for, idle spares among them. `cost_per_useful_gpu_hour` is what an hour
    of lasting work costs. `memory_ratio`: share of the failures that needed no store, with its 95 %
    interval."""

    policy: str
    spares: int
    memory_bytes: float
    failures: float
    effective_ratio: Spread
    lost_steps: Spread
    lost_steps_per_failure: float
    down_ratio: float
    stalled_ratio: float
    lost_ratio: float
    gpu_hours: float
    wasted_gpu_hours: float
    memory_ratio: float
    memory_ratio_interval: tuple[float, float]
    recovered: dict[str, int]
    cost: float | None
    wasted_cost: float | None
    cost_per_useful_gpu_hour: float | None


def spread(values: Sequence[float]) -> Spread:
    single = len(values) == 1
    low, high = (None, None) if single else mean_interval(values)
    deciles = list(values) * 9 if single else quantiles(values, n=10, method="inclusive")
    return Spread(
        fmean(values), low, high, min(values), deciles[0], deciles[4], deciles[8], max(values)
    )


def summarise(
    cluster: Cluster,
    spares: int,
    memory_bytes: float,
    outcomes: Sequence[WalkOutcome],
    gpu_hour_cost: float | None,
) -> Row:
    """Of one policy's outcomes, one a seed."""
    ratios = [outcome.effective_ratio for outcome in outcomes]
    total_s, failures = sum(o.total_s for o in outcomes), sum(o.failures for o in outcomes)
    lost_steps = [outcome.lost_s / cluster.iteration_s for outcome in outcomes]
    recovered = {
        source: sum(o.recovered[source] for o in outcomes) for source in ("own", "peers", "store")
    }
    from_memory = recovered["own"] + recovered["peers"]
    gpu_hours = (cluster.nodes + spares) * cluster.gpus_per_node * outcomes[0].total_s / 3600
    useful = cluster.gpus * outcomes[0].total_s / 3600 * fmean(ratios)
    cost = None if gpu_hour_cost is None else gpu_hours * gpu_hour_cost
    return Row(
        policy=outcomes[0].policy,
        spares=spares,
        memory_bytes=memory_bytes,
        failures=failures / len(outcomes),
        effective_ratio=spread(ratios),
        lost_steps=spread(lost_steps),
        lost_steps_per_failure=sum(lost_steps) / failures if failures else 0.0,
        down_ratio=sum(o.down_s for o in outcomes) / total_s,
        stalled_ratio=sum(o.stalled_s for o in outcomes) / total_s,
        lost_ratio=sum(o.lost_s for o in outcomes) / total_s,
        gpu_hours=gpu_hours,
        wasted_gpu_hours=gpu_hours - useful,
        memory_ratio=from_memory / failures if failures else 1.0,
        memory_ratio_interval=share_interval(from_memory, failures),
        recovered=recovered,
        cost=cost,
        wasted_cost=None if gpu_hour_cost is None else (gpu_hours - useful) * gpu_hour_cost,
        cost_per_useful_gpu_hour=cost / useful if cost is not None and useful > 0 else None,
    )
