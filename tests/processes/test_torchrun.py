"""Two to four ranks on one machine under torchrun, which knows nothing of keepstep: a rank is
killed, torchrun starts all anew, and they end in the state of a run that was left alone. And
what a rank meets that torchrun leaves alone with a lost peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.script_runs import PATIENCE_S, TORCHRUN, ScriptRun, killed_and_undisturbed

pytestmark = pytest.mark.timeout(500)

HELD_STEP = 6
PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import keepstep

torch.manual_seed(0)
dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(96, 16), torch.randn(96, 1))
net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 1))
model = DistributedDataParallel(net, find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
job = keepstep.protect(model=model, optimizer=optimizer, scheduler=scheduler)
data = job.loader(DataLoader(dataset, 4, sampler=DistributedSampler(dataset)))
for step in job.steps(16):
    inputs, targets = next(data)
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
"""


@pytest.mark.parametrize(
    ("ranks", "killed_rank"),
    [pytest.param(2, 1, marks=pytest.mark.everyday), (3, 0), (4, 2)],
)
def test_a_killed_rank_costs_its_launchers_restart(
    tmp_path: Path, ranks: int, killed_rank: int
) -> None:
    ends_with = "model.state_dict(), optimizer.state_dict(), scheduler.state_dict()"
    killed, _ = killed_and_undisturbed(
        tmp_path, PROGRAM, ends_with, ranks, HELD_STEP, TORCHRUN, killed_rank
    )
    resumed = killed.events("resumed")[-1]
    assert (resumed.data["source"], resumed.data["lost_steps"]) == ("memory", 0), resumed.why


# a rank is killed in the first attempt, and in the second its peer is there long before it
EARLY = """
import os, signal, threading, time
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
is_killed = (attempt, rank) == ("0", "1")
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
if is_killed and os.environ["KILLED"] == "during":
    threading.Timer(1, kill).start()
if (attempt, rank) in (("0", "0"), ("1", "1")):
    time.sleep(3)
torch.manual_seed(0)
keepstep.init_process_group()
if is_killed:
    kill()
model = DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
job = keepstep.protect(model=model, optimizer=optimizer)
for step in job.steps(4):
    with step:
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
assert attempt == "1", "one kill, one restart"
"""
ONE_RESTART = (*TORCHRUN[:-1], "1")


@pytest.mark.parametrize("killed", ["during", pytest.param("after", marks=pytest.mark.everyday)])
def test_a_rank_killed_around_the_start_of_the_groups_costs_one_restart(
    tmp_path: Path, killed: str
) -> None:
    """Though torchrun keeps its store, with the dead rank's address, over restarts."""
    environ = {"KILLED": killed, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    run = ScriptRun(tmp_path, EARLY, "model.state_dict()", 2, -1, ONE_RESTART, environ)
    try:
        digests = run.end()
    finally:
        run.stop()
    assert len(set(digests)) == 1, run.told()


# torchrun ends the others of a rank that was killed; it does not hear of this one
ALONE = """
import os, signal, subprocess, sys

if "IS_RANK" not in os.environ:
    rank = subprocess.run([sys.executable, *sys.argv], env={**os.environ, "IS_RANK": "1"})
    sys.exit(f"ended with {rank.returncode}" if os.environ["RANK"] == "0" else 0)

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

keepstep.init_process_group()
model = DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
job = keepstep.protect(model=model, optimizer=optimizer)
for step in job.steps(16):
    with step:
        if job.rank == 1 and job.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.everyday
def test_with_keepsteps_groups_a_lost_peer_is_an_error_out_of_the_backward_pass(
    tmp_path: Path,
) -> None:
    without_restarts = TORCHRUN[:-2]
    grace = {"KEEPSTEP_GRACE_S": "1"}
    run = ScriptRun(tmp_path, ALONE, "None", 2, -1, without_restarts, grace)
    try:
        assert run.process.wait(PATIENCE_S) == 1, run.told()
    finally:
        run.stop()
    told = run.log.read_text(errors="replace")
    assert "ended with 1\n" in told and "RuntimeError" in told and "by peer" in told, told
