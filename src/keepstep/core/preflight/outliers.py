"""Outliers: which node is slower than its fleet, and is that more than noise?

Comes in: samples of one quantity by node. Goes out: the nodes that are worse than the others, with
the ratio and what would have passed.

A node is compared with the median of the *others*, in log space, where twice as fast and half as
fast are equally far and a single outlier moves nothing; of an even number the slower one of the two
in the middle, so that at most half of a fleet is ever accused. What passes is the quantity's own
ratio, or less where the fleet itself is wider: four times the spread of the others, or of a node's
own samples, both as scaled medians of absolute deviations (1.4826 MAD estimates a normal
deviation).

With fewer than three nodes there is no fleet: nobody is an outlier, and only the floor judges.
Invariant: in what unit something is measured, and in which order nodes are given, changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from keepstep.core.preflight.catalogue import Quantity, is_harmless

FEWEST_NODES = 3
DEVIATIONS = 4.0
NORMAL = 1.4826
MOST_ALLOWED = math.log(10)  # whatever the noise, ten times slower is slow


@dataclass(frozen=True, slots=True)
class FleetOutlier:
    """`ratio`: of its speed to the others' median, below 1; `least_ratio`: what would have
    passed."""

    node: int
    value: int
    others: int
    ratio: float
    least_ratio: float


def outliers(by_node: Mapping[int, Sequence[int]], quantity: Quantity) -> list[FleetOutlier]:
    """The slow ones, by number. Nodes without samples are nobody's peers."""
    logs = {node: speeds(values, quantity) for node, values in by_node.items() if values}
    if len(logs) < FEWEST_NODES:
        return []
    middles = {node: median(values) for node, values in logs.items()}
    noise = median(deviation(values) for values in logs.values())
    found = []
    for node in sorted(logs):
        others = [middle for peer, middle in middles.items() if peer != node]
        centre = median_low(others)
        spread = median(abs(value - centre) for value in others) * NORMAL
        allowed = allowed_lag(quantity, max(spread, noise))
        lag = centre - middles[node]
        value = value_of(middles[node], quantity)
        if lag > allowed and not is_harmless(quantity, value):
            found.append(
                FleetOutlier(
                    node,
                    value,
                    value_of(centre, quantity),
                    math.exp(-lag),
                    math.exp(-allowed),
                )
            )
    return found


def allowed_lag(quantity: Quantity, deviation_of_log: float) -> float:
    """How far in log space a speed may be behind, where speeds deviate by so much anyway."""
    return min(MOST_ALLOWED, max(-math.log(quantity.least_ratio), DEVIATIONS * deviation_of_log))


def speeds(values: Sequence[int], quantity: Quantity) -> list[float]:
    """In log space, higher is faster. A value of 0 counts as 1."""
    sign = 1 if quantity.measure.is_better_high else -1
    return [sign * math.log(max(1, value)) for value in values]


def value_of(log_speed: float, quantity: Quantity) -> int:
    """The inverse of `speeds`, to a whole number."""
    return round(math.exp(log_speed if quantity.measure.is_better_high else -log_speed))


def deviation(logs: Sequence[float]) -> float:
    """Of one node's own samples: what a normal deviation would be."""
    middle = median(logs)
    return median(abs(value - middle) for value in logs) * NORMAL


def middle_of(values: Sequence[int]) -> int:
    """The figure that stands for samples: their median, to a whole number."""
    return round(median(values))
