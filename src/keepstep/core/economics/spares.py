"""Spares: how many nodes are being replaced at once.

Comes in: a cluster. Goes out: probabilities, and how many spares suffice. Each failure's nodes are
away for `replacement_s`; how many are away at once is compound Poisson distributed, since a rack
takes several with it. Exact where failures are independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import count

from keepstep.model.cluster import DAY_S, Cluster, FailureKind, Scope

UNIT = 1e200  # chances are carried as multiples of a unit, which grows by this factor


def failures_per_s(cluster: Cluster, kind: FailureKind) -> float:
    """How often this kind strikes anywhere in the cluster."""
    return kind.per_node_day * cluster.nodes / DAY_S


def spares(cluster: Cluster, quantile: float) -> int:
    """So many nodes, or fewer, are being replaced at once with this probability."""
    reached = enumerate(_cumulative(_replaced_at_once(cluster)))
    return next(nodes for nodes, probability in reached if probability >= quantile)


@cache
def all_in_use(cluster: Cluster, spare_nodes: int) -> float:
    """Probability that a failure finds every one of so many spares in use."""
    if spare_nodes == 0:
        return 1.0
    reached = enumerate(_cumulative(_replaced_at_once(cluster)))
    return 1 - next(probability for nodes, probability in reached if nodes == spare_nodes - 1)


def _replaced_at_once(cluster: Cluster) -> dict[int, float]:
    """Mean number of events whose nodes are being replaced, by how many nodes an event takes."""
    means: dict[int, float] = {}
    for kind in cluster.failures:
        if kind.replaces:
            size = cluster.nodes_per_rack if kind.scope is Scope.RACK else 1
            mean = failures_per_s(cluster, kind) * cluster.replacement_s
            means[size] = means.get(size, 0.0) + mean
    return means


def _cumulative(means: Mapping[int, float]) -> Iterator[float]:
    """P(at most 0, 1, 2, .. nodes), where the numbers of events that take `size` nodes are Poisson
    distributed with these means (Panjer's recursion)."""
    total = sum(means.values())
    # e^-total alone is no float beyond 745: chances are multiples of a unit, and the unit a
    # logarithm.
    chances = [1.0]
    log_unit = -total
    reached = math.exp(-total)
    yield reached
    # From here on the tail is nothing that a float could show.
    longest = 20 * (total + 10) * max(means, default=1)
    for nodes in count(1):
        before = (
            (mean * size, chances[nodes - size]) for size, mean in means.items() if size <= nodes
        )
        chance = sum(weight * earlier for weight, earlier in before) / nodes
        if chance > UNIT:
            chances = [each / UNIT for each in chances]
            chance /= UNIT
            log_unit += math.log(UNIT)
        chances.append(chance)
        reached += math.exp(log_unit + math.log(chance)) if chance > 0 else 0.0
        yield min(reached, 1.0) if nodes < longest else 1.0
