"""Cluster: the machines a job would run on and how they fail, as far as a plan or a simulation
needs to know.

Values only, checked when they are made. `core/economics/costs.py` says what a policy costs on one,
`sim/economics/presets.py` names some, `sim/economics/clusters.py` reads one from a file. Rates are
those of one node, so that a cluster of another size fails accordingly.

Invariant: every number is finite and within its bounds, and every rack failure has racks to happen
in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from keepstep.errors import ConfigError
from keepstep.model.topology import Topology, topology

DAY_S = 86_400.0


class Scope(str, Enum):
    """What goes with a failure. A broken device takes its node out of service, and the node's
    memory with it."""

    RANK = "rank"
    DEVICE = "device"
    NODE = "node"
    RACK = "rack"


@dataclass(frozen=True, slots=True)
class FailureKind:
    """One way to fail. `detection_s`: when it differs from the cluster's. `latency_s`: of silent
    errors, how long the state has been wrong when somebody notices; then only a checkpoint older
    than that is of use."""

    name: str
    scope: Scope
    per_node_day: float
    detection_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _bounded(f"failure {self.name}: per_node_day", self.per_node_day, 0)
        _bounded(f"failure {self.name}: latency_s", self.latency_s, 0)
        if self.detection_s is not None:
            _bounded(f"failure {self.name}: detection_s", self.detection_s, 0)

    @property
    def replaces(self) -> bool:
        """Whether a node must be replaced."""
        return self.scope is not Scope.RANK


@dataclass(frozen=True, slots=True)
class Cluster:
    """`state_bytes`: the whole job's state, each byte once. `network_gbps`, `host_gbps` (between
    devices and host memory), `memory_bytes`: of one node. `network_idle_ratio`: what part of the
    network training leaves to copies. `store_gbps`: of the whole store. `store_stall_s`: what a
    checkpoint written without keepstep holds up training. `restart_s`: from "go" until all ranks
    train again; `in_process_restart_s`: the same when survivors stay in their processes.
    `replacement_s`: until a node that was not waiting as a spare is there. `nodes_per_rack`: 0 when
    nobody said."""

    name: str
    nodes: int
    gpus_per_node: int
    state_bytes: float
    iteration_s: float
    memory_bytes: float
    network_gbps: float
    store_gbps: float
    detection_s: float
    restart_s: float
    replacement_s: float
    failures: tuple[FailureKind, ...]
    host_gbps: float = 400.0
    network_idle_ratio: float = 0.15
    store_stall_s: float | None = None
    in_process_restart_s: float | None = None
    nodes_per_rack: int = 0
    spares: int = 0

    def __post_init__(self) -> None:
        for key, least in LEAST.items():
            value = getattr(self, key)
            if value is not None:
                _bounded(key, value, least)
        if not 0 < self.network_idle_ratio <= 1:
            raise ConfigError(
                "network_idle_ratio: expected more than 0 and at most 1, found "
                f"{self.network_idle_ratio:g}"
            )
        names = [kind.name for kind in self.failures]
        if len(set(names)) < len(names):
            raise ConfigError(f"failures: expected a name for each, found {', '.join(names)}")
        racked = [kind.name for kind in self.failures if kind.scope is Scope.RACK]
        if racked and not self.nodes_per_rack:
            raise ConfigError(
                f"nodes_per_rack: expected the size of a rack, because {racked[0]!r} fails "
                "racks, found 0"
            )

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def node_bytes(self) -> float:
        """A node's share of the state."""
        return self.state_bytes / self.nodes

    @property
    def failures_per_day(self) -> float:
        return self.nodes * sum(kind.per_node_day for kind in self.failures)

    def rack_of(self, node: int) -> range:
        """The nodes that go together when this one's rack does."""
        start = node - node % self.nodes_per_rack
        return range(start, min(start + self.nodes_per_rack, self.nodes))

    def topology(self) -> Topology:
        racks = (
            [f"rack-{node // self.nodes_per_rack}" for node in range(self.nodes)]
            if self.nodes_per_rack
            else None
        )
        return topology(self.nodes, racks)


TINY = 1e-9
LEAST = {
    **dict.fromkeys(("nodes", "gpus_per_node"), 1.0),
    **dict.fromkeys(
        ("state_bytes", "iteration_s", "memory_bytes", "network_gbps", "store_gbps", "host_gbps"),
        TINY,
    ),
    **dict.fromkeys(
        (
            "detection_s",
            "restart_s",
            "replacement_s",
            "store_stall_s",
            "in_process_restart_s",
            "nodes_per_rack",
            "spares",
        ),
        0.0,
    ),
}


def _bounded(key: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        words = "more than 0" if least == TINY else f"{least:g} or more"
        raise ConfigError(f"{key}: expected {words}, found {value:g}")
