"""A node whose rank has cost what a swap costs leaves its place to a spare, at the next boundary,
with nothing lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.config import job_dir_of
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import read_node_safety
from tests.processes.test_run_nodes import Begin, machines, until

__all__ = ["machines"]  # a fixture

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.soak,
    pytest.mark.skipif(
        "SLOW_SWAP" not in os.environ,
        reason="two minutes of a machine that is not busy: SLOW_SWAP=1 asks for it",
    ),
]
STEPS, SLOW_FROM, SLOW_HOST = 300, 60, "127.0.0.12"
# Two ranks a node, for one has nobody on its node to be compared with; the second of them is slow
# where that host is. Nothing computes: on few processors that would make others slow.
PROGRAM = f"""
import os, pathlib, sys, time, torch, keepstep
weights = torch.zeros(1000)
keepstep.init_process_group()
job = keepstep.protect(weights=weights)
is_slow = os.environ["KEEPSTEP_HOST"] == "{SLOW_HOST}" and os.environ["LOCAL_RANK"] == "1"
for step in job.steps({STEPS}):
    with step:
        time.sleep(0.25 if is_slow and step >= {SLOW_FROM} else 0.02)
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        weights += total
    while step == {SLOW_FROM} - 20 and not pathlib.Path("go-on").exists():
        time.sleep(0.05)
pathlib.Path(f"sum-{{os.environ['RANK']}}").write_text(str(float(weights.mean())))
"""
# A swap costs what the ranks took to start, which is most of a minute on a busy machine: an agent
# of this test takes it for a second.
CHEAPER = """
import sys
if "keepstep.cli.main" in sys.orig_argv:
    from keepstep.core.economics import swap_price
    price = swap_price.SwapPrice(10**9, "assumed: by this test")
    swap_price.SwapCosts.price = property(lambda costs: price)
"""


def test_a_node_with_a_slow_rank_leaves_its_place_to_a_spare(
    machines: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(CHEAPER)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("KEEPSTEP_SLOW_RANKS", "swap")
    job = machines('exec "$PYTHON" "$PROGRAM"', program=PROGRAM)
    nodes = [job.start("--redundancy", "copies:2", nproc=2)]
    nodes[0].wait_for("nodes-awaited")
    nodes.append(job.start("--redundancy", "copies:2", nproc=2))
    nodes[1].wait_for("attempt-formed")
    spare = job.start("--redundancy", "copies:2", nproc=2)
    spare.wait_for("nodes-awaited")
    until(
        lambda: (
            1
            in (
                read_node_safety(MEMORY, job_dir_of(nodes[1].arena_dir, "t")) or {"expendable": ()}
            )["expendable"]
        ),
        "that node 1 may be lost",
    )
    job.allow("go-on")
    spare.wait_for("attempt-formed")
    for node in (nodes[0], spare):
        code, output = node.ended()
        assert code == 0, output
    told = nodes[1].events("slow-rank")[0].data
    assert (told["rank"], told["section"]) == (3, "compute")
    formed = spare.events("attempt-formed")[-1].data
    assert formed["node"] == 1 and [host.partition(":")[0] for host in formed["hosts"]] == [
        "127.0.0.11",
        "127.0.0.13",
    ]
    resumed = nodes[0].events("resumed")[-1].data
    assert resumed["source"] == "memory" and resumed["step"] >= SLOW_FROM
    assert [job.out(f"sum-{rank}") for rank in range(4)] == [str(4.0 * STEPS)] * 4
