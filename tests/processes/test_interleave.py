"""Real ranks on two nodes: their keepers see when DDP leaves the network idle, and send there;
without a network to share they say so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep.testing.network import why_no_namespaces

pytestmark = pytest.mark.timeout(240)
STEPS = 60
SCRIPT = f"""
import time, torch, keepstep
keepstep.init_process_group()
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters())
job = keepstep.protect(model=model, optimizer=optimizer)
for step in job.steps({STEPS}):
    with step:
        time.sleep(0.1)  # an accelerator computes
        ddp(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def trained(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """What the nodes' journals say after a job of two nodes."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [
        "lab",
        "run",
        "--nodes",
        "2",
        "--policy",
        "copies:2",
        "--work",
        str(tmp_path / "work"),
        *options,
        str(script),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        line
        for path in (tmp_path / "work").rglob("journal.jsonl")
        for line in path.read_text().splitlines()
    ]
    return [json.loads(line) for line in lines]


@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
def test_copies_go_where_the_ranks_leave_the_network_idle(tmp_path: Path) -> None:
    events = trained(tmp_path, "--rate", "400mbit")
    told = [event["why"] for event in events if event["kind"] == "interleave"]
    assert (
        sum(
            why.startswith(
                "copies go where the trainers leave the network idle: the network is idle for "
            )
            for why in told
        )
        >= 2
    ), told
    [one, two] = [event["data"] for event in events if event["kind"] == "summary"]
    assert (
        one["captured_steps"] + one["skipped_steps"]
        == two["captured_steps"] + two["skipped_steps"]
        == STEPS
    )


def test_on_loopback_they_go_at_once(tmp_path: Path) -> None:
    told = [
        event["why"] for event in trained(tmp_path, "--loopback") if event["kind"] == "interleave"
    ]
    assert told and all(
        "the links are loopback" in why or "no rank tells" in why for why in told
    ), told
