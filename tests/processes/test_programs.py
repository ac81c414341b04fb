"""Programs of the findings and drawn ones under `keepstep.protect`: killed with SIGKILL in the
middle of a step, started again, and equal in the end to one that was never disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.program import AVERAGES, BLOCKS, CONTAINERS, OPTIMIZERS, VALUES, ZEROING, Plan

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]

LIFE = """
import json, os, signal, sys
import torch
import keepstep
from tests.programs.program import Plan, Program

config, plan, kill_in = json.loads(sys.argv[1])
torch.set_num_threads(1)
plan = Plan.of(plan)
program = Program(plan)
if config is None:
    program.run(0, plan.total_steps)
else:
    job = keepstep.protect(config, **program.protected)
    print("first", job.step + 1, flush=True)
    for step in job.steps(plan.total_steps):
        assert job._drain(job._rank.drain, within_s=60)
        program.step(step)
        if step == kill_in:
            os.kill(os.getpid(), signal.SIGKILL)
    assert job._drain(job._rank.drain, within_s=60)
print("digest", program.digest(), flush=True)
"""


def live(config: object, plan: Plan, kill_in: int | None) -> dict[str, str]:
    """One process's last words."""
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIFE, json.dumps([config, plan.to_json(), kill_in])],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        check=False,
    )
    assert child.returncode == (0 if kill_in is None else -signal.SIGKILL)
    return dict(line.split() for line in child.stdout.splitlines())


def drawn(seed: int) -> Plan:
    """One of many; which is the seed's to say."""
    chance = random.Random(seed)
    return Plan(
        seed=seed,
        blocks=tuple(chance.choice(sorted(BLOCKS)) for _ in range(3)),
        optimizers=tuple(chance.choice(sorted(OPTIMIZERS)) for _ in range(2)),
        zeroing=chance.choice(ZEROING),
        container=chance.choice(CONTAINERS),
        average=chance.choice(AVERAGES),
        values=tuple(chance.sample(VALUES, 2)),
        total_steps=6,
        cut=chance.randint(1, 3),
    )


PLANS = {
    "a list of optimizers": Plan(optimizers=("adam", "momentum"), container="list"),
    "a group that is added, and buffers that grow": Plan(
        blocks=("growing", "late", "expanded"), events=((1, "add group"),)
    ),
    "an idle expert whose gradient is zero": Plan(
        blocks=("expert", "expert"), zeroing="zeros first"
    ),
    "gradients that wait for the next step": Plan(zeroing="every other", scaler=True),
    "values by reference": Plan(values=("array", "deque", "record", "slotted", "generators")),
    **{f"drawn, seed {seed}": drawn(seed) for seed in range(3)},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("values by reference", marks=pytest.mark.everyday),
        *[name for name in PLANS if name != "values by reference"],
    ],
)
def test_a_killed_program_ends_as_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    (tmp_path / "arena").mkdir()
    config = {
        "job": "j",
        "arena_dir": str(tmp_path / "arena"),
        "state_dir": str(tmp_path / "state"),
        "grace_s": 60.0,
    }
    said = live(config, plan, kill_in=plan.cut + 1)
    assert said == {"first": "0"}
    said = live(config, plan, kill_in=None)
    assert said["first"] == str(plan.cut + 1)
    assert said["digest"] == live(None, plan, kill_in=None)["digest"]
