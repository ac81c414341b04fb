"""A trainer's forked children (a data loader's workers) must not keep a killed trainer looking
alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.config import job_dir_of

SCRIPT = """
import multiprocessing, os, signal, sys, torch, keepstep
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
job = keepstep.protect(model=model, optimizer=optimizer)
workers = iter(torch.utils.data.DataLoader(torch.ones(1000, 4), batch_size=4, num_workers=2))
first = job.step < 0
print("begins at", job.step + 1, flush=True)
for step in job.steps(30):
    model(next(workers)).sum().backward()
    optimizer.step()
    if step == 20 and first and sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 20 and sys.argv[1] == "terminate-child":
        child = multiprocessing.get_context("fork").Process(target=signal.pause)
        child.start()
        os.kill(child.pid, signal.SIGTERM)
        child.join(20)
        print("child ended with", child.exitcode, flush=True)
print("ended well")
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    places = {
        "KEEPSTEP_ARENA_DIR": str(tmp_path),
        "KEEPSTEP_JOB": "forks",
        "KEEPSTEP_GRACE_S": "20",
    }
    return {**os.environ, **places, "KEEPSTEP_STATE_DIR": str(tmp_path / "state")}


def run(mode: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, mode],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_killed_trainer_with_data_loader_workers_resumes(
    environ: dict[str, str], tmp_path: Path
) -> None:
    assert run("kill", environ).returncode == -signal.SIGKILL
    again = run("kill", environ)
    assert again.returncode == 0, again.stderr
    begins = int(again.stdout.split("begins at ")[1].split()[0])
    assert 0 < begins <= 20  # on a busy machine some of such quick steps are not captured
    assert not job_dir_of(tmp_path, "forks").exists()


@pytest.mark.everyday
def test_a_forked_child_ends_on_sigterm_and_the_trainer_goes_on(environ: dict[str, str]) -> None:
    """The trainer's handler is inherited by fork: it must neither shield the child nor tell the
    trainer."""
    done = run("terminate-child", environ)
    assert done.stdout.splitlines()[1:] == ["child ended with -15", "ended well"], done.stderr
