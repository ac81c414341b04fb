"""Cluster files and presets: what is read, and how mistakes are named."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest

from keepstep.errors import ConfigError
from keepstep.model.cluster import Cluster, Scope
from keepstep.sim.economics import clusters
from keepstep.sim.economics.clusters import cluster_from
from keepstep.sim.economics.presets import PRESETS, preset

DOCUMENT: dict[str, Any] = {
    "nodes": 16,
    "gpus_per_node": 8,
    "state_gb": 1203.2,
    "iteration_s": 62,
    "memory_gb": 1152,
    "network_gbps": 400,
    "store_gbps": 20,
    "detection_s": 15,
    "restart_s": 253,
    "replacement_s": 330,
    "failures": [{"name": "GPU", "scope": "device", "per_day": 0.24}],
}


def changed(**changes: Any) -> dict[str, Any]:
    document = {**deepcopy(DOCUMENT), **changes}
    return {key: value for key, value in document.items() if value is not None}


def test_a_file_is_the_preset_it_describes() -> None:
    found = cluster_from(DOCUMENT, "mine")
    assert (
        found.name == "mine"
        and found.gpus == 128
        and found.state_bytes == pytest.approx(PRESETS["p4d-16"].state_bytes)
    )
    (kind,) = found.failures
    assert (
        kind.scope is Scope.DEVICE
        and kind.per_node_day == pytest.approx(0.015)
        and found.failures_per_day == pytest.approx(0.24)
    )


def test_everything_that_may_be_said_is_taken() -> None:
    optional = {
        "host_gbps": 100,
        "network_idle_ratio": 0.3,
        "store_stall_s": 81,
        "in_process_restart_s": 9,
        "nodes_per_rack": 4,
        "spares": 2,
    }
    kinds = [
        {"name": "rack", "scope": "rack", "per_node_day": 0.001, "detection_s": 3, "latency_s": 60}
    ]
    found = cluster_from(changed(**optional, failures=kinds, name="named"), "mine")
    assert found.name == "named" and all(
        getattr(found, key) == value for key, value in optional.items()
    )
    assert (found.failures[0].detection_s, found.failures[0].latency_s) == (3, 60)
    assert list(found.rack_of(6)) == [4, 5, 6, 7] and len(found.topology().racks) == 4


def test_the_example_in_the_module_is_a_cluster() -> None:
    tomllib = pytest.importorskip("tomllib")
    example = re.search(r"\n((?:    .*\n|\n)+)", clusters.__doc__ or "")
    assert example is not None
    assert isinstance(
        cluster_from(tomllib.loads(example[1].replace("    ", "")), "example"), Cluster
    )


FAILURE = {"name": "GPU", "scope": "device", "per_day": 0.24}
MISTAKES = [
    ({"nodez": 3}, "unknown key 'nodez'; did you mean 'nodes'?"),
    ({"iteration_s": None}, "expected iteration_s, found only"),
    ({"failures": None}, "expected failures"),
    ({"nodes": 0}, "nodes: expected 1 or more, found 0"),
    ({"nodes": 2.5}, "nodes: expected a whole number, found 2.5"),
    ({"nodes": True}, "nodes: expected a whole number, found True"),
    ({"state_gb": "much"}, "state_gb: expected a number, found 'much'"),
    ({"state_gb": 0}, "state_bytes: expected more than 0, found 0"),
    ({"iteration_s": -62}, "iteration_s: expected more than 0, found -62"),
    ({"restart_s": float("nan")}, "restart_s: expected 0 or more, found nan"),
    (
        {"network_idle_ratio": 1.5},
        "network_idle_ratio: expected more than 0 and at most 1, found 1.5",
    ),
    ({"name": 7}, "name: expected a text, found 7"),
    ({"failures": 3}, "expected tables [[failures]], found 3"),
    (
        {"failures": [{**FAILURE, "scope": "galaxy"}]},
        "failure GPU: scope: expected one of rank, device, node, rack, found 'galaxy'",
    ),
    (
        {"failures": [{**FAILURE, "per_day": -1}]},
        "failure GPU: per_day: expected 0 or more, found -1",
    ),
    (
        {"failures": [{**FAILURE, "per_node_day": 1}]},
        "expected per_node_day or per_day (of the whole job), found both",
    ),
    ({"failures": [{"name": "GPU", "scope": "device"}]}, "found neither"),
    (
        {"failures": [{**FAILURE, "latency_s": -5}]},
        "failure GPU: latency_s: expected 0 or more, found -5",
    ),
    (
        {"failures": [{**FAILURE, "scope": "rack"}]},
        "nodes_per_rack: expected the size of a rack, because 'GPU' fails racks, found 0",
    ),
    ({"failures": [FAILURE, FAILURE]}, "failures: expected a name for each, found GPU, GPU"),
]


@pytest.mark.parametrize(("change", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_mistake_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster_from(changed(**change), "mine")
    assert words in str(caught.value)


def test_presets_are_what_they_say() -> None:
    assert PRESETS["p4d-16"].gpus == 128 and PRESETS["p4d-1000"].failures_per_day == pytest.approx(
        15
    )
    llama, large = preset("llama3-16384"), preset("gpus-100k")
    assert llama.gpus == 16_384 and llama.failures_per_day * 54 == pytest.approx(419)
    assert large.gpus == 100_000 and large.nodes == 12_500


def test_an_unknown_preset_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="found 'p4d-61'; did you mean 'p4d-16'"):
        preset("p4d-61")
