"""What the pages say that a user may run, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.script_runs import killed_and_undisturbed

pytestmark = pytest.mark.timeout(600)

README = Path(__file__).parents[2] / "README.md"


def program() -> str:
    """The first block of Python that is a whole program."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return next(block for block in blocks if "keepstep.protect(" in block)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.everyday), 2])
def test_it_ends_with_the_same_bits_when_it_is_killed(tmp_path: Path, ranks: int) -> None:
    ends_with = "model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), data.batch"
    held_step = 37  # in the second epoch
    killed, undisturbed = killed_and_undisturbed(tmp_path, program(), ends_with, ranks, held_step)
    if ranks > 1:
        assert killed.events("regrouped"), "the other rank stays in its process"
    assert not [e for run in (killed, undisturbed) for e in run.events("caveat")]


MAKES_A_STORE = """
import sys, torch, keepstep

torch.manual_seed(3)
model = torch.nn.Linear(5, 2)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
job = keepstep.protect(model=model, optimizer=optimizer)
for step in job.steps(12):
    optimizer.zero_grad()
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
print([p.tolist() for p in model.parameters()])
"""
READS_IT = """
import sys, torch
sys.modules["keepstep"] = None  # it cannot be imported
store, model = sys.argv[1], torch.nn.Linear(5, 2)
BLOCK
assert state["model"]["weight"].equal(model.weight) and state["optimizer"]["state"]
print([p.tolist() for p in model.parameters()])
"""


@pytest.mark.everyday
def test_a_checkpoint_is_read_without_keepstep(tmp_path: Path) -> None:
    operations = README.parent / "docs" / "operations.md"
    blocks = re.findall(r"```python\n(.*?)```", operations.read_text(), re.DOTALL)
    block, one_file = (one for one in blocks if "torch.distributed.checkpoint" in one)
    assert "dcp.load(" in block and "torch.load(" in one_file
    arena = tmp_path / "arena"
    arena.mkdir()
    places = {"KEEPSTEP_ARENA_DIR": str(arena), "KEEPSTEP_STATE_DIR": str(tmp_path / "state")}
    places |= {"KEEPSTEP_STORE": str(tmp_path / "store"), "KEEPSTEP_JOB": "reads"}
    made = _run(MAKES_A_STORE, tmp_path / "makes.py", **places)
    source = READS_IT.replace("BLOCK", block + one_file)
    assert _run(source, tmp_path / "reads.py", str(tmp_path / "store")) == made


def _run(source: str, path: Path, *words: str, **environ: str) -> str:
    path.write_text(source)
    done = subprocess.run(
        [sys.executable, str(path), *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=200,
        cwd=path.parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
