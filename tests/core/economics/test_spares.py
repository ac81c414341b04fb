"""Spares: what is computed against counting."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from keepstep.core.economics.spares import all_in_use, spares
from keepstep.model.cluster import FailureKind, Scope
from keepstep.sim.economics.presets import PRESETS

NODE, RACK = FailureKind("node", Scope.NODE, 0.4), FailureKind("rack", Scope.RACK, 0.05)


@pytest.mark.parametrize(
    ("replacement_s", "kinds"),
    [(600.0, (NODE,)), (86_400.0, (NODE,)), (86_400.0, (NODE, RACK)), (20 * 86_400.0, (NODE,))],
)
def test_so_many_spares_suffice_99_of_100_times(
    replacement_s: float, kinds: tuple[FailureKind, ...]
) -> None:
    cluster = replace(
        PRESETS["p4d-16"], nodes=100, nodes_per_rack=3, replacement_s=replacement_s, failures=kinds
    )
    draw, trials, found = random.Random(3), 3000, spares(cluster, 0.99)

    def out_at_once() -> int:
        total = 0
        for kind in kinds:
            at_s, per_s = 0.0, kind.per_node_day * cluster.nodes / 86_400
            while (at_s := at_s + draw.expovariate(per_s)) < replacement_s:
                total += 3 if kind.scope is Scope.RACK else 1
        return total

    seen = [out_at_once() for _ in range(trials if replacement_s < 1e6 else 400)]
    noise = 4 * math.sqrt(0.99 * 0.01 / len(seen))
    assert sum(count <= found for count in seen) / len(seen) >= 0.99 - noise
    if found:  # and one less would not do
        assert sum(count <= found - 1 for count in seen) / len(seen) <= 0.99 + noise


def test_the_spares_distribution_survives_means_beyond_what_a_float_can_hold() -> None:
    """e^-1000 is no float; a Poisson of mean 1000 has its 99th percentile at 1074."""
    cluster = replace(
        PRESETS["p4d-16"],
        nodes=1000,
        replacement_s=86_400.0,
        failures=(FailureKind("node", Scope.NODE, 1.0),),
    )
    assert spares(cluster, 0.99) == 1074
    assert [spares(cluster, q) for q in (0.1, 0.5, 0.9)] == [960, 1000, 1041]


@pytest.mark.parametrize("mean", [0.1, 2.0, 30.0])
def test_how_often_all_spares_are_in_use(mean: float) -> None:
    """Single nodes: the tail of a Poisson distribution."""
    cluster = replace(
        PRESETS["p4d-16"],
        nodes=1,
        replacement_s=86_400.0,
        failures=(replace(NODE, per_node_day=mean),),
    )
    chances = [math.exp(-mean + n * math.log(mean) - math.lgamma(n + 1)) for n in range(60)]
    for count in (0, 1, 3, 40):
        assert all_in_use(cluster, count) == pytest.approx(1 - sum(chances[:count]), abs=1e-12)
