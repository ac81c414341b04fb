"""An agent that is killed when the ranks are about to end: the next one learns that they have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.script_runs import KEEPSTEP_RUN, ScriptRun

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import os, signal
import torch
from torch import nn
import keepstep

keepstep.init_process_group()
torch.set_num_threads(1)
torch.manual_seed(7)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
job = keepstep.protect(model=model, optimizer=optimizer)
for step in job.steps(12):
    with step:
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
    if int(step) == 11 and int(os.environ["RANK"]) == 0 and "DIES" in os.environ:
        os.kill(int(os.environ["KEEPSTEP_AGENT"]), signal.SIGKILL)
job.close()
"""


@pytest.fixture
def runs() -> Iterator[list[ScriptRun]]:
    made: list[ScriptRun] = []
    yield made
    for run in made:
        run.stop()


def test_nothing_is_trained_again(tmp_path: Path, runs: list[ScriptRun]) -> None:
    found = []
    for name, environ in (("alone", {}), ("dies", {"DIES": "1"})):
        states = "model.state_dict(), optimizer.state_dict()"
        runs.append(ScriptRun(tmp_path / name, SCRIPT, states, 2, -1, KEEPSTEP_RUN, environ))
        found.append(runs[-1].end())
    assert found[0] == found[1]
    run = runs[-1]
    assert len(run.events("resumed")) == len(run.events("job-over")) == 1
    assert "all ranks had ended well" in run.events("job-ended")[0].why
    assert list(run.arena.iterdir()) == [], "the agent that came too late has left its own behind"
