"""The swarm: some seeds for a while, every seed that once failed, and the same run twice is the
same run.

The seeds are the same each time, so that a change is judged by what it changes. `make soak` hunts
with fresh ones."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.model.units import S_NS
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.swarm import many, run, story
from keepstep.sim.protocol.world.world import PortFault

FIRST_SEED = 5000
WITHIN_S = 20.0
LOOP_S = 4.0
SEEDS = [
    line.split()
    for line in (Path(__file__).parent / "seeds.txt").read_text().splitlines()
    if not line.startswith("#")
]


def test_seeds_for_a_while() -> None:
    runs, failed, _ = many(itertools.count(FIRST_SEED), WITHIN_S, tell=False)
    assert runs and not failed, story(failed[0])


@pytest.mark.parametrize("seed", [int(line[0]) for line in SEEDS])
def test_what_once_failed(seed: int) -> None:
    outcome = run(seed)
    assert outcome.wrong is None, story(outcome)


def test_a_seed_is_a_run_whatever_the_order_of_sets() -> None:
    command = [sys.executable, "-m", "keepstep.sim.protocol.swarm", "--digests", "0:12"]
    digests = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": h}, check=True, capture_output=True
        ).stdout
        for h in "12"
    ]
    assert digests[0] == digests[1] and len(digests[0].splitlines()) == 12


@pytest.mark.parametrize("role", ["agent", "keeper", "persister", "rank"])
@pytest.mark.parametrize("is_deadly", [True, False], ids=["the process dies", "the port fails"])
def test_every_port_call_may_be_the_one_that_fails(role: str, is_deadly: bool) -> None:
    """The n-th call of a port, for n = 1, 2, .. until a run sees no fault; here as many as there is
    time for, spread over all of them."""
    plan = RunPlan(
        nodes=2, ranks_per_node=1, steps=4, store=True, persist_every_steps=2, limit_ns=1000 * S_NS
    )
    calls = run(1, plan).port_calls[role]
    numbers = range(1 + calls % 7, calls + 1, 7)
    runs, failed, _ = many(
        numbers,
        LOOP_S,
        tell=False,
        how=lambda number: run(1, plan, PortFault(role, number, is_deadly)),
    )
    assert runs and not failed, story(failed[0])
