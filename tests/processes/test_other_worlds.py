"""A checkpoint of so many ranks, and a job of another number: each stands where the last one ended,
with shards that are cut anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

PROGRAM = """
import hashlib, json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import keepstep

steps, told = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
keepstep.init_process_group()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(dist.get_rank())  # what is not restored differs
model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), 0.05)
job = keepstep.protect(model=model, optimizer=optimizer)

def digest():
    found = hashlib.sha256()
    values = [*model.state_dict().values()]
    for state in optimizer.state.values():
        values += [state[key] for key in sorted(state)]
    for value in values:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()

began = [job.step, digest()]
for step in job.steps(steps):
    with step:
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
ended = [job.step, digest()]
if dist.get_rank() == 0:
    with open(told, "w") as file:
        json.dump([began, ended], file)
"""


def test_shards_are_cut_anew_for_more_ranks_and_for_fewer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "arena").mkdir()
    last: list[object] = []
    for life, ranks in enumerate([2, 3, 1, 4]):
        told = tmp_path / f"told-{life}"
        command = [sys.executable, "-m", "keepstep.cli.main", "run", "--job", "j"]
        command += ["--arena-dir", str(tmp_path / "arena"), "--state-dir", str(tmp_path / "state")]
        command += ["--store", str(tmp_path / "store"), "--standby", "0"]
        command += ["--nproc-per-node", str(ranks)]
        command += [str(tmp_path / "train.py"), str(5 * (life + 1)), str(told)]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        began, ended = json.loads(told.read_text())
        assert ended[0] == 5 * (life + 1) - 1
        assert not last or began == last
        last = ended
