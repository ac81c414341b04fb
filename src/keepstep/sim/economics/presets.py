"""Presets: clusters by name. What is published is cited; what is not is said to be assumed, and a
file can say better.

Llama 3 (arXiv 2407.21783): 54 days on 16,384 GPUs, 419 unexpected interruptions by cause. Two nodes
share a rack and its switch there, so a network failure is counted as the loss of a rack: the worst
reading. Planned interruptions are not failures and not here.
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from keepstep.errors import ConfigError
from keepstep.model.cluster import Cluster, FailureKind, Scope
from keepstep.sim.economics import gemini

LLAMA_NODES, LLAMA_DAYS = 2048, 54.0
LLAMA_COUNTS = (
    # name, scope, count, seconds until it is detected (None: as a crash), seconds unnoticed
    ("GPU", Scope.DEVICE, 148, None, 0.0),
    ("HBM3", Scope.DEVICE, 72, None, 0.0),
    ("software", Scope.RANK, 54, None, 0.0),
    ("network switch or cable", Scope.RACK, 35, None, 0.0),
    ("host maintenance", Scope.NODE, 32, None, 0.0),
    ("GPU SRAM", Scope.DEVICE, 19, None, 0.0),
    ("GPU system processor", Scope.DEVICE, 17, None, 0.0),
    ("NIC", Scope.NODE, 7, None, 0.0),
    ("NCCL watchdog timeout", Scope.RANK, 7, 600.0, 0.0),  # its default timeout
    ("silent data corruption", Scope.DEVICE, 6, None, 3600.0),  # unnoticed for an hour: assumed
    ("GPU thermal or sensor", Scope.DEVICE, 6, None, 0.0),
    ("SSD", Scope.NODE, 3, None, 0.0),
    ("power supply", Scope.NODE, 3, None, 0.0),
    ("others", Scope.NODE, 10, None, 0.0),
)
LLAMA_FAILURES = tuple(
    FailureKind(name, scope, count / LLAMA_DAYS / LLAMA_NODES, detection_s, latency_s)
    for name, scope, count, detection_s, latency_s in LLAMA_COUNTS
)

P4D_16 = Cluster(
    name="p4d-16",
    nodes=16,
    gpus_per_node=8,
    state_bytes=gemini.STATE_BYTES,
    iteration_s=gemini.ITERATION_S,
    memory_bytes=1152e9,
    network_gbps=400,
    store_gbps=gemini.STORE_GBPS,
    detection_s=gemini.DETECTION_S,
    restart_s=gemini.RESTART_S,
    in_process_restart_s=20.0,  # assumed
    replacement_s=330.0,  # "4 to 7 minutes"
    failures=(FailureKind("instance", Scope.NODE, gemini.INSTANCE_FAILURES_PER_DAY),),
    store_stall_s=gemini.TORCH_SAVE_S,
)

LLAMA = Cluster(
    name="llama3-16384",
    nodes=LLAMA_NODES,
    gpus_per_node=8,
    state_bytes=405e9 * 12,  # weights and two moments in fp32
    iteration_s=6.2,  # 16 M tokens at 400 TFLOP/s a GPU, the published rates
    memory_bytes=1024e9,  # assumed
    network_gbps=8 * 400,
    store_gbps=2000 * 8,  # 2 TB/s sustained
    detection_s=30.0,  # assumed, and so are the next four
    restart_s=300.0,
    in_process_restart_s=30.0,
    replacement_s=3600.0,
    spares=16,
    failures=LLAMA_FAILURES,
    nodes_per_rack=2,
)

PRESETS = {
    "p4d-16": P4D_16,
    "p4d-1000": replace(P4D_16, name="p4d-1000", nodes=1000),
    "llama3-16384": LLAMA,
    # Llama 3's failures a node, network and store; a model of 2e12 parameters: assumed.
    "gpus-100k": replace(
        LLAMA, name="gpus-100k", nodes=12_500, state_bytes=2e12 * 12, iteration_s=10.0, spares=64
    ),
}


def preset(name: str) -> Cluster:
    """Raises ConfigError with the nearest known name."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, [*PRESETS, "gemini-fig15"], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"preset: expected one of {', '.join(PRESETS)} (simulate also gemini-fig15), "
            f"found {name!r}{hint}"
        )
    return PRESETS[name]
