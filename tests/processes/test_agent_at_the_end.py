"""An agent that is killed when the ranks are about to end: who comes next learns that they have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.edge.os.process_stat import process_stat
from tests.processes.script_runs import KEEPSTEP_RUN, PATIENCE_S, ScriptRun
from tests.processes.waiting import until

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
STATES = "model.state_dict(), optimizer.state_dict()"
EXPORT = """
import time
while "EXPORTS" in os.environ and not os.path.exists(f"{os.environ['RESULTS']}/go-on"):
    time.sleep(0.01)
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
        runs.append(ScriptRun(tmp_path / name, SCRIPT, STATES, 2, -1, KEEPSTEP_RUN, environ))
        found.append(runs[-1].end())
    assert found[0] == found[1]
    run = runs[-1]
    assert len(run.events("resumed")) == len(run.events("job-over")) == 1
    assert "all ranks had ended well" in run.events("job-ended")[0].why
    assert list(run.arena.iterdir()) == [], "the agent that came too late has left its own behind"


def test_a_start_leaves_an_export_of_finished_ranks_alone(
    tmp_path: Path, runs: list[ScriptRun]
) -> None:
    script, environ = SCRIPT + EXPORT, {"EXPORTS": "1"}
    run = ScriptRun(tmp_path / "exports", script, STATES, 2, -1, KEEPSTEP_RUN, environ)
    runs.append(run)
    run.wait_for("rank-bye", 2)
    run.process.kill()  # the supervisor: its agent dies with it
    run.process.wait()
    until(lambda: run.events("job-over"), "the end of the training", PATIENCE_S)
    run.start()
    assert run.process.wait(PATIENCE_S) == 2, run.told()
    assert "the earlier run ended well" in run.told() and "[KS2104]" in run.told()
    assert run.events("left-ranks-ended") == [] and len(run.events("resumed")) == 1

    (run.results / "go-on").touch()
    ranks = {e.data["pid"] for e in run.events("rank-joined")}

    def exported() -> bool:
        found = map(process_stat, ranks)
        return all(stat is None or stat.has_ended for stat in found)

    until(exported, "the end of the exports", PATIENCE_S)
    assert all((run.results / f"rank-{rank}").exists() for rank in range(2))
    run.start()
    run.end()
    assert run.events("resumed")[-1].data["source"] == "fresh", "another run, as was asked for"
