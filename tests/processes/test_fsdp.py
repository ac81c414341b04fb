"""FSDP2 on two ranks: each keeps its own part, uneven and empty parts too, and a resumed training
ends where an undisturbed one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import ctypes, hashlib, json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import keepstep

config, meeting, total, until, seed = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method="file://" + meeting, rank=int(os.environ["RANK"]), world_size=2
)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(seed)
# 7 rows on 2 ranks, and 1 row on 2 ranks
model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 1))
for layer in (model[0], model[3]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), 0.05)
torch.manual_seed(seed + dist.get_rank())  # each rank its own data and its own dropout

class Average:
    def __init__(self):
        self.shadow = [p.detach().clone() for p in model.parameters()]
    def state_dict(self):
        return {"shadow": self.shadow}
    def load_state_dict(self, state):
        self.shadow = state["shadow"]

ema = {name: p.detach().clone() for name, p in model.named_parameters()}  # DTensors
average = Average()
job = keepstep.protect(
    config, model=model, tools=[optimizer, {"average": average}], ema=ema
)
first = job.step + 1

def train():
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for (name, p), mine in zip(model.named_parameters(), average.shadow, strict=True):
            ema[name].mul_(0.9).add_(p, alpha=0.1)
            mine.lerp_(p, 0.5)

for step in job.steps(until):
    assert job._drain(job._rank.drain, within_s=60)
    train()
job.close(ok=until == total)
for step in range(until, total):  # what would have come, had it not left
    train()

def local(t):
    return t.to_local() if isinstance(t, DTensor) else t

tensors = [local(t) for t in model.state_dict().values()]
tensors += [local(t) for s in optimizer.state.values() for t in s.values()]
tensors += [local(t) for t in (*ema.values(), *average.shadow)]
assert all(isinstance(t, DTensor) for t in (*ema.values(), *average.shadow))
tensors += [torch.get_rng_state()]
raw = b"".join(ctypes.string_at(t.contiguous().data_ptr(), t.nbytes) for t in tensors)
digest = hashlib.sha256(raw).hexdigest()
parts = [list(t.shape) for t in tensors[:4]]
print(json.dumps({"first": first, "parts": parts, "digest": digest}), flush=True)
dist.barrier()
os._exit(0)  # gloo's and the interpreter's own tear-down have aborted here, when all was said
"""


def train(tmp_path: Path, until: int, seed: int, total: int = 8) -> list[dict[str, object]]:
    """Both ranks' last words after training `total` steps, the first `until` of them protected."""
    arena = tmp_path / "arena"
    arena.mkdir(exist_ok=True)
    config = {
        "job": "j",
        "arena_dir": str(arena),
        "state_dir": str(tmp_path / "state"),
        "grace_s": 60.0,
    }
    meeting = tmp_path / f"meeting-{seed}"
    arguments = json.dumps([config, str(meeting), total, until, seed])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, arguments],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in said]


@pytest.mark.everyday
def test_a_sharded_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    left = train(tmp_path, until=5, seed=5)
    resumed = train(tmp_path, until=8, seed=77)
    assert [rank["first"] for rank in left + resumed] == [0, 0, 5, 5]
    assert [rank["parts"] for rank in resumed] == [
        [[4, 6], [4], [1, 7], [1]],
        [[3, 6], [3], [0, 7], [0]],
    ]
    assert [rank["digest"] for rank in resumed] == [rank["digest"] for rank in left]
    assert resumed[0]["digest"] != resumed[1]["digest"], "each rank has a part of its own"
    assert list((tmp_path / "arena").iterdir()) == []
