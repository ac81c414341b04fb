"""Cluster: sums, racks and bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.errors import ConfigError
from keepstep.model.cluster import Cluster, FailureKind, Scope

CLUSTER = Cluster(
    name="ten",
    nodes=10,
    gpus_per_node=8,
    state_bytes=100e9,
    iteration_s=10.0,
    memory_bytes=100e9,
    network_gbps=80,
    store_gbps=8,
    detection_s=5.0,
    restart_s=60.0,
    replacement_s=600.0,
    failures=(FailureKind("node", Scope.NODE, 0.1), FailureKind("crash", Scope.RANK, 0.2)),
)


def test_sums() -> None:
    assert (
        CLUSTER.gpus == 80
        and CLUSTER.node_bytes == 10e9
        and CLUSTER.failures_per_day == pytest.approx(3)
    )
    assert [kind.replaces for kind in CLUSTER.failures] == [True, False]


def test_a_larger_cluster_fails_as_often_a_node() -> None:
    assert replace(CLUSTER, nodes=20).failures_per_day == pytest.approx(6)


def test_the_last_rack_may_be_smaller() -> None:
    racked = replace(CLUSTER, nodes_per_rack=4)
    assert [list(racked.rack_of(node)) for node in (0, 7, 9)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert [len(ids) for ids in racked.topology().racks.values()] == [4, 4, 2]
    assert CLUSTER.topology().racks == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 0}, "nodes: expected 1 or more, found 0"),
        ({"store_gbps": 0.0}, "store_gbps: expected more than 0, found 0"),
        ({"replacement_s": float("inf")}, "replacement_s: expected 0 or more, found inf"),
        (
            {"network_idle_ratio": 0.0},
            "network_idle_ratio: expected more than 0 and at most 1, found 0",
        ),
        (
            {"failures": (FailureKind("a", Scope.RACK, 0.1),)},
            "nodes_per_rack: expected the size of a rack, because 'a' fails racks, found 0",
        ),
    ],
)
def test_bounds(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(CLUSTER, **change)  # type: ignore[arg-type]


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="failure GPU: per_node_day: expected 0 or more, found -1"
    ):
        FailureKind("GPU", Scope.DEVICE, -1)
