"""Real keepers of several nodes: what they protect, what a node's loss costs, what crosses the wire for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.testing.cluster import Cluster


@pytest.mark.parametrize(("policy", "nodes"), [("copies:2", 2), ("none", 2), ("parity:3", 3), ("rs:2+2", 4), ("copies:2", 3)])
def test_every_step_is_committed(tmp_path: Path, policy: str, nodes: int) -> None:
    with Cluster(tmp_path, nodes, policy) as cluster:
        assert cluster.resume()["source"] == "fresh"
        cluster.train(0, 5)
        assert cluster.committed() == [5] * nodes


@pytest.mark.parametrize(
    ("policy", "nodes", "lost"),
    [
        ("copies:2", 2, (0,)),
        ("copies:2", 3, (1,)),
        ("copies:3", 3, (0, 2)),
        ("parity:3", 3, (1,)),
        ("rs:2+2", 4, (0, 3)),
        ("parity:4", 4, (0,)),
    ],
)
def test_lost_nodes_come_back_from_the_others(tmp_path: Path, policy: str, nodes: int, lost: tuple[int, ...]) -> None:
    with Cluster(tmp_path, nodes, policy, per_node=2) as cluster:
        cluster.resume()
        cluster.train(0, 6)
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(*lost)
        offer = cluster.resume()
        assert (offer["source"], offer["step"]) == ("memory", 6)
        fetched = [e for m in cluster.machines for e in m.events() if e.kind == "fetched"]
        assert sorted(e.data["rank"] for e in fetched) == sorted(r for n in lost for r in (2 * n, 2 * n + 1))
        cluster.train(7, 9)
