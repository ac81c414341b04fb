"""Two stages of two real ranks each, over groups that torch's DeviceMesh makes: what they enter
tells who does the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.core.detection.work_peers import peers_of
from keepstep.model.step_work import GroupEntries, Section, WorkBlock

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
import keepstep
from keepstep.edge.torch.membership import membership

in_world = sys.argv[2] == "world"
torch.manual_seed(0)
keepstep.init_process_group()
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
pipe = None if in_world else mesh["pipeline"].get_group()
stage, other = rank // 2, (rank + 2) % 4
layer = torch.nn.Linear(8, 8)
model = DistributedDataParallel(layer, process_group=mesh["data"].get_group())
before, groups = membership.entered, {g: c for g, *c in membership.entered_by_group}
for _ in range(3):
    given = torch.zeros(4, 8, requires_grad=True)
    if stage:
        dist.recv(given.data, other, group=pipe)
    out = model(given)
    if not stage:
        dist.send(out.detach(), other, group=pipe)
        gradient = torch.empty(4, 8)
        dist.recv(gradient, other, group=pipe)
        out.backward(gradient)
    else:
        out.sum().backward()
        dist.send(given.grad, other, group=pipe)
    norm = layer.weight.grad.norm()
    dist.all_reduce(norm)
told = [
    [group, *(now - then for now, then in zip(counts, groups.get(group, [0, 0])))]
    for group, *counts in membership.entered_by_group
]
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump([membership.entered - before, told], file)
dist.barrier()
dist.destroy_process_group()
"""
NONE = (0,) * len(Section)


@pytest.mark.parametrize("messages_in", ["pipeline", "world"])
def test_ranks_of_a_stage_are_peers_and_stages_are_not(tmp_path: Path, messages_in: str) -> None:
    program, told = tmp_path / "train.py", tmp_path / "told"
    program.write_text(SCRIPT)
    told.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "4", str(program), str(told), messages_in],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert len(list(told.iterdir())) == 4, done.stdout + done.stderr
    blocks = {}
    for rank in range(4):
        total, groups = json.loads((told / f"{rank}.json").read_text())
        entered = tuple(GroupEntries(*counts) for counts in groups)
        assert total == sum(one.collectives + one.messages for one in entered)
        blocks[rank] = [WorkBlock(3, NONE, NONE, 0, NONE, total, 0, groups=entered)]
    assert len({blocks[rank][0].collectives for rank in range(4)}) == 1, "one number tells nothing"
    assert set(peers_of(blocks).values()) == {frozenset({0, 1}), frozenset({2, 3})}
