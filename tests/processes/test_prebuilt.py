"""What the process that stands by has built is the successor's, and the end is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.script_runs import KEEPSTEP_RUN, ScriptRun

pytestmark = pytest.mark.timeout(600)

MODELS = """
import os
import torch

def make():
    with open(os.environ["RESULTS"] + "/builders", "a") as file:
        print(os.getpid(), file=file)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
"""
TRAINS = """
import torch
import keepstep

keepstep.init_process_group()
torch.manual_seed(11)
model = torch.nn.parallel.DistributedDataParallel(keepstep.prebuilt("models:make"))
data = torch.randn(64, 8)  # drawn behind the model, and the same whoever has built that
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
job = keepstep.protect(model=model, optimizer=optimizer)
for step in job.steps(16):
    with step:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
"""


def test_the_successor_gets_what_was_built_before_it_was_needed(tmp_path: Path) -> None:
    launcher = (*KEEPSTEP_RUN, "--prebuild", "models:make")
    runs = []
    for name, held_step in (("killed", 7), ("undisturbed", -1)):
        room = tmp_path / name
        room.mkdir()
        (room / "models.py").write_text(MODELS)
        ends_with = "model.state_dict(), optimizer.state_dict(), data"
        runs.append(ScriptRun(room, TRAINS, ends_with, 2, held_step, launcher))
        try:
            if held_step >= 0:
                runs[-1].hold()
                runs[-1].wait_for("standby-ready", 1)
                [stood_by] = [event.data["pid"] for event in runs[-1].events("standby-ready")]
                runs[-1].kill(1)
            digests = runs[-1].end()
        finally:
            runs[-1].stop()
        if held_step >= 0:
            killed = digests
    assert killed == digests, runs[0].told()
    assert runs[0].events("rank-respawned"), runs[0].told()
    builders = [int(line) for line in (runs[0].results / "builders").read_text().split()]
    assert builders.count(stood_by) == 1 and len(builders) >= 3  # both ranks, and who stood by
