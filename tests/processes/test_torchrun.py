"""Two to four ranks on one machine under torchrun, which knows nothing of keepstep: a rank is
killed, torchrun starts all anew, and they end in the state of a run that was left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.script_runs import TORCHRUN, killed_and_undisturbed

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
