"""Cluster files: a TOML document becomes a Cluster.

    nodes = 16
    gpus_per_node = 8
    state_gb = 1203           # of the whole job: parameters and optimizer; GB are 10^9 bytes
    iteration_s = 62
    memory_gb = 1152          # of a node, for states
    network_gbps = 400        # of a node
    store_gbps = 20           # of the store
    detection_s = 15
    restart_s = 253
    replacement_s = 330

    [[failures]]
    name = "GPU"
    scope = "device"          # rank, device, node or rack
    per_node_day = 0.015      # or per_day, of the whole job

Optional: name, host_gbps, network_idle_ratio, store_stall_s, in_process_restart_s, nodes_per_rack,
spares; of a failure detection_s and latency_s. What they mean: `model/cluster.py`. Every mistake
names key, expected and found.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from keepstep.errors import ConfigError
from keepstep.model.cluster import Cluster, FailureKind, Scope

GIGABYTE_KEYS = {"state_gb": "state_bytes", "memory_gb": "memory_bytes"}
WHOLE = {"nodes", "gpus_per_node", "nodes_per_rack", "spares"}
REQUIRED = [
    field.name
    for field in fields(Cluster)
    if field.default is MISSING and field.name not in ("name", "failures")
]


def cluster_from(document: Mapping[str, Any], default_name: str) -> Cluster:
    """Raises ConfigError."""
    names = {bytes_key: key for key, bytes_key in GIGABYTE_KEYS.items()}
    known = [names.get(field.name, field.name) for field in fields(Cluster)]
    _only(document, known, "cluster")
    for key in [names.get(key, key) for key in REQUIRED] + ["failures"]:
        if key not in document:
            raise ConfigError(
                f"cluster: expected {key}, found only {', '.join(sorted(document)) or 'nothing'}"
            )
    values: dict[str, Any] = {"name": _text(document.get("name", default_name), "name")}
    for key, value in document.items():
        if key not in ("name", "failures"):
            number = _number(value, key, whole=key in WHOLE)
            values[GIGABYTE_KEYS.get(key, key)] = number * 1e9 if key in GIGABYTE_KEYS else number
    return Cluster(**values, failures=_failures(document["failures"], values["nodes"]))


def _failures(found: object, nodes: int) -> tuple[FailureKind, ...]:
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ConfigError(f"failures: expected tables [[failures]], found {found!r}")
    return tuple(_kind(each, nodes) for each in found)


def _kind(found: Mapping[str, Any], nodes: int) -> FailureKind:
    _only(
        found, ["name", "scope", "per_node_day", "per_day", "detection_s", "latency_s"], "failures"
    )
    name = _text(found.get("name"), "failures: name")
    scopes = [scope.value for scope in Scope]
    if found.get("scope") not in scopes:
        raise ConfigError(
            f"failure {name}: scope: expected one of {', '.join(scopes)}, found "
            f"{found.get('scope')!r}"
        )
    if ("per_day" in found) == ("per_node_day" in found):
        said = "both" if "per_day" in found else "neither"
        raise ConfigError(
            f"failure {name}: expected per_node_day or per_day (of the whole job), found {said}"
        )
    key = "per_day" if "per_day" in found else "per_node_day"
    rate = _number(found[key], f"failure {name}: {key}")
    if rate < 0:
        raise ConfigError(f"failure {name}: {key}: expected 0 or more, found {rate:g}")
    others = {
        key: _number(found[key], f"failure {name}: {key}")
        for key in ("detection_s", "latency_s")
        if key in found
    }
    return FailureKind(
        name, Scope(found["scope"]), rate / nodes if key == "per_day" and nodes else rate, **others
    )


def _only(found: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}: unknown key {key!r}{hint} (known: {', '.join(known)})")


def _number(value: object, key: str, whole: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ConfigError(f"{key}: expected a {'whole ' if whole else ''}number, found {value!r}")
    return value


def _text(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: expected a text, found {value!r}")
    return value
