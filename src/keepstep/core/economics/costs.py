"""Economics: what a policy costs on a cluster, a step and a failure at a time.

Comes in: a cluster and a policy such as `copies:2/in-process/spares:4/store:1h`. Goes out:
`Charges`, which the simulation spends event by event (`sim/economics/montecarlo.py`) and the
planner in expectation (`core/economics/planner.py`), and the exact expectations of single tiers.
Never draws.

A *tier* is a place where states are kept: a rank's own node, other nodes, the store. Every tier is
two numbers: how much work lies between two of its states, and how long after its moment a state can
be used. With them the wasted time of GEMINI's equation 1, t_ckpt + 1/(2f) + t_rtvl, is lag +
interval/2 + fetch.

What is assumed: copies travel in the part of the network that training leaves idle and hold nothing
up; a copy that takes longer than a step is made every second (third, ..) step; a state is fetched
at full rate, because nobody trains meanwhile. A checkpoint that is written from memory costs the
time its bytes would take of a node's network; one that is written without keepstep,
`store_stall_s`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from keepstep.core.redundancy.memory_budget import HEADROOM_RATIO
from keepstep.errors import ConfigError
from keepstep.model.cluster import Cluster
from keepstep.model.topology import (
    Auto,
    Copies,
    NoRedundancy,
    Parity,
    ReedSolomon,
    Scheme,
    parse_policy,
)
from keepstep.model.units import human_bytes


@dataclass(frozen=True, slots=True)
class Tier:
    """`interval_s`: work between two states. `lag_s`: work until such a state can be used.
    `fetch_s`: until it is loaded."""

    interval_s: float
    lag_s: float
    fetch_s: float

    def newest(self, work_s: float) -> float:
        """The newest usable state's work; 0 is where everybody starts."""
        return max(0.0, math.floor((work_s - self.lag_s) / self.interval_s) * self.interval_s)

    @property
    def wasted_s(self) -> float:
        """Expected loss of a failure at a random moment: GEMINI's equation 1."""
        return self.lag_s + self.interval_s / 2 + self.fetch_s

    def lasting_ratio(self, per_s: float) -> float:
        """Part of the work that lasts when failures at this rate go back to this tier: exact.

        A run of length X from a state adds one interval for every k >= 1 with X >= k interval +
        lag.
        """
        if per_s <= 0:
            return 1.0
        x = per_s * self.interval_s
        return x * math.exp(-per_s * self.lag_s) / math.expm1(x) if x < 700 else 0.0


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    """A policy to compare. `scheme`: what memory holds, None for nothing. `store_s`: work between
    checkpoints; 0: as often as the store allows. `spares`: None takes the cluster's."""

    scheme: Scheme | None
    store_s: float = 10_800.0
    in_process: bool = False
    spares: int | None = None

    def __str__(self) -> str:
        store = f"store:{human_interval(self.store_s)}"
        parts = [store] if self.scheme is None else [str(self.scheme)]
        parts += ["in-process"] * self.in_process
        parts += [f"spares:{self.spares}"] if self.spares is not None else []
        parts += [store] if self.scheme is not None and self.store_s != DEFAULT_STORE_S else []
        return "/".join(parts)


DEFAULT_STORE_S = 10_800.0


@dataclass(frozen=True, slots=True)
class Charges:
    """`pace_ratio`: work per second of training. `own`: a failure that leaves the node's memory;
    `peers`: one that takes it; both None when memory holds nothing. `redundant_s`: after a
    recovery, until every state is held by all its holders again."""

    pace_ratio: float
    own: Tier | None
    peers: Tier | None
    store: Tier
    restart_s: float
    redundant_s: float
    memory_bytes: float


def charges(cluster: Cluster, policy: ClusterPolicy, two_slots_ratio: float) -> Charges:
    """`two_slots_ratio`: the placement's. Raises ConfigError when the state does not fit into
    memory."""
    store_s = cluster.state_bytes * 8 / (cluster.store_gbps * 1e9)
    restart_s = _restart_s(cluster, policy)
    checkpoint_s = max(policy.store_s, store_s)
    scheme = policy.scheme
    if scheme is None:
        stall_s = plain_stall_s(cluster)
        store = Tier(_steps(checkpoint_s, cluster), store_s, store_s)
        return Charges(
            store.interval_s / (store.interval_s + stall_s), None, None, store, restart_s, 0.0, 0.0
        )
    memory_bytes = two_slots_ratio * cluster.node_bytes
    if memory_bytes > cluster.memory_bytes * (1 - HEADROOM_RATIO):
        raise ConfigError(
            f"{policy}: expected at most {human_bytes(int(cluster.memory_bytes))} a node "
            f"({HEADROOM_RATIO:.0%} kept free), "
            f"found a need of {human_bytes(int(memory_bytes))}: {two_slots_ratio:.3g} x "
            f"{human_bytes(int(cluster.node_bytes))} of state"
        )
    seal_s = cluster.node_bytes * 8 / (cluster.host_gbps * 1e9)
    wire_s = cluster.node_bytes * 8 / (cluster.network_gbps * 1e9)
    spread_s = sent_ratio(scheme) * wire_s / cluster.network_idle_ratio
    every_s = _steps(max(cluster.iteration_s, spread_s), cluster)
    own = Tier(every_s, min(seal_s, cluster.iteration_s), seal_s)
    # A code's pieces are added up on the way (`runtime/replication/repair_sums.py`): a new node
    # receives its own state once. Where several of a group are lost at once it takes longer.
    peers = Tier(every_s, seal_s + spread_s, wire_s + seal_s)
    store = Tier(_steps(checkpoint_s, cluster), store_s, store_s)
    pace = store.interval_s / (store.interval_s + persist_stall_s(cluster))
    return Charges(pace, own, peers, store, restart_s, spread_s, memory_bytes)


def plain_stall_s(cluster: Cluster) -> float:
    """What a checkpoint holds up training when nothing is in memory: as said, else the copy to the
    host."""
    return (
        cluster.node_bytes * 8 / (cluster.host_gbps * 1e9)
        if cluster.store_stall_s is None
        else cluster.store_stall_s
    )


def persist_stall_s(cluster: Cluster) -> float:
    """What one from memory takes from training: its bytes' time on a node's network."""
    return cluster.node_bytes * 8 / (cluster.network_gbps * 1e9)


def sent_ratio(scheme: Scheme) -> float:
    """What a node sends of its state at every step."""
    match scheme:
        case Copies(m):
            return m - 1.0
        case Parity():
            return 1.0
        case ReedSolomon(_, m):
            return float(m)
        case NoRedundancy():
            return 0.0


def _steps(seconds: float, cluster: Cluster) -> float:
    """Whole steps, at least so long."""
    return math.ceil(seconds / cluster.iteration_s - 1e-9) * cluster.iteration_s


def _restart_s(cluster: Cluster, policy: ClusterPolicy) -> float:
    if not policy.in_process:
        return cluster.restart_s
    if cluster.in_process_restart_s is None:
        raise ConfigError(
            f"{policy}: expected in_process_restart_s in cluster {cluster.name!r}, found none"
        )
    return cluster.in_process_restart_s


EXPECTED = (
    "none, copies:M, parity:N, rs:K+M or store:INTERVAL, then /in-process, /spares:N, "
    "/store:INTERVAL (such as 90s, 20m, 3h, max)"
)


def parse_cluster_policy(text: str) -> ClusterPolicy:
    """The inverse of `str(policy)`. Raises ConfigError naming expected and found."""
    first, *rest = text.split("/")
    found = (
        ClusterPolicy(None, interval(first[6:], text))
        if first.startswith("store:")
        else _scheme(first, text)
    )
    for part in rest:
        key, _, value = part.partition(":")
        if part == "in-process":
            found = ClusterPolicy(found.scheme, found.store_s, True, found.spares)
        elif key == "spares" and value.isascii() and value.isdigit():
            found = ClusterPolicy(found.scheme, found.store_s, found.in_process, int(value))
        elif key == "store" and found.scheme is not None:
            found = ClusterPolicy(
                found.scheme, interval(value, text), found.in_process, found.spares
            )
        else:
            raise ConfigError(f"policy: expected {EXPECTED}, found {part!r} in {text!r}")
    return found


def _scheme(text: str, whole: str) -> ClusterPolicy:
    try:
        scheme = parse_policy(text)
    except ConfigError:
        raise ConfigError(f"policy: expected {EXPECTED}, found {whole!r}") from None
    if isinstance(scheme, Auto):
        raise ConfigError(f"policy: expected {EXPECTED}, found {whole!r}: `keepstep plan` chooses")
    return ClusterPolicy(scheme)


UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def interval(text: str, whole: str) -> float:
    """`3h` in seconds; `max`, as often as the store allows, is 0. Raises ConfigError."""
    if text == "max":
        return 0.0
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if parts is None or float(parts[1]) == 0:
        raise ConfigError(
            f"policy: expected an interval such as 90s, 20m, 3h or max, found {text!r} in {whole!r}"
        )
    return float(parts[1]) * UNITS_S[parts[2]]


def human_interval(seconds: float) -> str:
    """`3h`: the inverse of `interval`."""
    if seconds == 0:
        return "max"
    unit = next((unit for unit in ("h", "m") if seconds % UNITS_S[unit] == 0), "s")
    return f"{seconds / UNITS_S[unit]:.10g}{unit}"
