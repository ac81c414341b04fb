"""Keepers of several nodes without agents, as under torchrun and srun: ranks change their nodes, and the memory stays until all have ended."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from keepstep.testing.cluster import Cluster


@pytest.mark.parametrize(("policy", "nodes"), [("copies:2", 2), ("copies:2", 4), ("parity:3", 3), ("rs:2+2", 4)])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_is_lost_and_the_ranks_change_their_nodes(tmp_path: Path, policy: str, nodes: int, lost: int) -> None:
    """A launcher that orders nodes by address puts the replacement anywhere; a rank may come to the very node that kept its copy."""
    with Cluster(tmp_path, nodes, policy) as cluster:
        cluster.resume()
        cluster.train(0, 3)
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(lost)
        cluster.machines = [*cluster.machines[1:], cluster.machines[0]]
        cluster.secret = secrets.token_hex(16)  # as sessions do, which make one for each start
        offer = cluster.resume()
        assert (offer["source"], offer["step"]) == ("memory", 3)
        cluster.train(4, 5)
