"""The commands on nodes of a real cluster: each shows what its own node holds and what the leader
told all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from keepstep.cli.main import app
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import read_node_safety
from keepstep.testing.cluster import ClusterMachine, KeeperCluster, wait_for


def ask(monkeypatch: pytest.MonkeyPatch, machine: ClusterMachine, *words: str) -> Any:
    monkeypatch.setenv("KEEPSTEP_ARENA_DIR", str(machine.settings.arena_dir))
    monkeypatch.setenv("KEEPSTEP_STATE_DIR", str(machine.settings.state_dir))
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(("policy", "kind"), [("copies:2", "copy"), ("parity:3", "parity")])
def test_a_lost_node_from_every_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, kind: str
) -> None:
    with KeeperCluster(tmp_path, 3, policy) as cluster:
        cluster.resume()
        cluster.train(0, 3)

        def told() -> bool:
            words = [read_node_safety(MEMORY, m.settings.job_dir) or {} for m in cluster.machines]
            return all(
                (w.get("step"), w.get("is_committed"), w.get("any_nodes")) == (3, True, 1)
                for w in words
            )

        wait_for(told, cluster.story)
        for i, machine in enumerate(cluster.machines):
            [job] = ask(monkeypatch, machine, "status")["jobs"]
            assert (job["horizon"]["step"], job["nodes"]["here"], job["nodes"]["doubt"]) == (
                3,
                i,
                "",
            )
            assert {p["against"]: p["step"] for p in job["protection"]} == {
                **{
                    "a killed process": 3,
                    "a damaged snapshot": 3,
                    "a lost node": 3,
                    "all nodes lost": None,
                },
            }
            [proven] = ask(monkeypatch, machine, "inspect")["jobs"]
            held = [s for s in proven["slots"] if s["kind"] != "own"]
            assert held and {(s["kind"], s["proof"]) for s in held} == {(kind, "intact")}
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(1)
        assert cluster.resume().step == 3
        for i, machine in enumerate(cluster.machines):
            [run] = ask(monkeypatch, machine, "explain")["runs"]
            [recovery] = run["recoveries"]
            assert (
                recovery["outcome"],
                recovery["source"],
                recovery["step"],
                recovery["lost_steps"],
            ) == ("resumed", "memory", 3, 0)
            assert ("fetched" in [s["name"] for s in recovery["stages"]]) == (i == 1)
