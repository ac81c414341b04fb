"""Ten nodes that are easy to reckon with: 10 GB a node, 0.5 s to the host, 1 s on the wire, 2 s in
its idle half, 100 s to the store."""

from __future__ import annotations

from keepstep.model.cluster import Cluster, FailureKind, Scope

NODE = FailureKind("node", Scope.NODE, 0.1)
TEN_NODES = Cluster(
    name="ten",
    nodes=10,
    gpus_per_node=8,
    state_bytes=100e9,
    iteration_s=10.0,
    memory_bytes=100e9,
    network_gbps=80,
    host_gbps=160,
    store_gbps=8,
    network_idle_ratio=0.5,
    detection_s=5.0,
    restart_s=60.0,
    in_process_restart_s=10.0,
    replacement_s=600.0,
    failures=(NODE,),
)
