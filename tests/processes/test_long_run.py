"""Three thousand steps and thirty kills: the state is that of an undisturbed training, and what
looks after it has not grown."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from keepstep.config import job_dir_of
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from keepstep.model.snapshot import RankStatus
from keepstep.model.units import KIB, MIB
from keepstep.testing.cluster import wait_for
from tests.processes.quick_steps import FEW_STEPS
from tests.processes.script_runs import ScriptRun

pytestmark = pytest.mark.timeout(1500)

STEPS = 3_000
KILLS = 30
SETTLED_KILLS = 5  # by then everything has been needed once
PATIENCE_S = 120.0
SCRIPT = f"""
import torch, keepstep
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
keepstep.init_process_group()
model = DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters())
job = keepstep.protect(model=model, optimizer=optimizer)
for step in job.steps({STEPS}):
    with step:
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
"""


@dataclass(frozen=True)
class Holdings:
    """What agent, supervisor and keeper have, and what lies in the job's directories."""

    memory_bytes: int
    descriptors: int
    threads: int
    files: int
    journal_bytes: int


def holdings(run: ScriptRun) -> Holdings:
    pids = [run.process.pid, run.events("job-started")[-1].data["pid"]]
    pids.append(run.events("keeper-started")[-1].data["pid"])
    lasting = [psutil.Process(pid) for pid in pids]
    files = [path for room in (run.arena, run.state) for path in room.rglob("*") if path.is_file()]
    return Holdings(
        memory_bytes=sum(process.memory_full_info().uss for process in lasting),
        descriptors=sum(process.num_fds() for process in lasting),
        threads=sum(process.num_threads() for process in lasting),
        files=len(files),
        journal_bytes=(run.state / "j" / "journal.jsonl").stat().st_size,
    )


def trains(run: ScriptRun, beyond: int) -> RankStatus | None:
    """Rank 0's page, once both ranks have done more than that step."""
    found = [read_status(MEMORY, job_dir_of(run.arena, "j"), rank) for rank in range(2)]
    if any(status is None or status.completed_step <= beyond for status in found):
        return None
    return found[0]


def has_resumed(run: ScriptRun, times: int) -> bool:
    """So often, beside the start."""
    return len(run.events("resumed")) > times


def test_three_thousand_steps_and_thirty_kills(tmp_path: Path) -> None:
    ends_with = "model.state_dict(), optimizer.state_dict()"
    whole = ScriptRun(tmp_path / "whole", SCRIPT, ends_with, ranks=2, held_step=-1)
    expected = whole.end()
    chance = random.Random(3)
    run = ScriptRun(tmp_path / "killed", SCRIPT, ends_with, ranks=2, held_step=-1)
    settled: Holdings | None = None
    for number in range(KILLS):
        beyond = number * (STEPS - 200) // KILLS + chance.randrange(50)
        wait_for(partial(trains, run, beyond), run.told, PATIENCE_S)
        if number == SETTLED_KILLS:
            settled = holdings(run)
        status = read_status(MEMORY, job_dir_of(run.arena, "j"), chance.randrange(2))
        assert status is not None
        os.kill(status.pid, signal.SIGKILL)
        wait_for(partial(has_resumed, run, number + 1), run.told, PATIENCE_S)
    wait_for(lambda: trains(run, STEPS - 150), run.told, PATIENCE_S)
    last = holdings(run)
    assert run.end() == expected
    assert settled is not None
    kills = KILLS - SETTLED_KILLS
    assert last.memory_bytes - settled.memory_bytes < 8 * MIB
    assert last.descriptors - settled.descriptors <= 4
    assert last.threads - settled.threads <= 2
    assert last.files - settled.files <= 2
    assert last.journal_bytes - settled.journal_bytes < 32 * KIB * kills
    assert all(event.data["lost_steps"] <= FEW_STEPS for event in run.events("resumed"))
