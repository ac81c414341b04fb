"""The end of a job: its last step is in the store, or it did not end well."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.edge.os.journal import read_journal
from keepstep.edge.store.store import Store
from keepstep.model.events import Event

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 120.0
STEPS = 10
PROGRAM = """
import json, os, shutil, sys
import torch, keepstep

config, how = json.loads(sys.argv[1]), sys.argv[2]
torch.manual_seed(1)
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
job = keepstep.protect(config, model=model, optimizer=optimizer)
for step in job.steps(10):
    optimizer.zero_grad()
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
if how == "asks":
    print(json.dumps([job.step, job.persist(wait=True).result().step]))
if how.startswith("breaks"):
    shutil.rmtree(config["store"])
    open(config["store"], "w").close()
if how == "breaks and closes":
    job.close()
"""


class Home:
    """Where one job lives."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.store = where / "store"
        self.store.mkdir()
        (where / "arena").mkdir()
        self.config = {
            "job": "j",
            "arena_dir": str(where / "arena"),
            "state_dir": str(where / "state"),
            "store": str(self.store),
            "persist_every_steps": 0,
            "grace_s": 60.0,
        }
        (where / "train.py").write_text(PROGRAM)

    def start(self, how: str = "") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.where / "train.py"), json.dumps(self.config), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def events(self, kind: str) -> list[Event]:
        journal = self.where / "state" / "j" / "journal.jsonl"
        return [e for e in read_journal(journal) if e.kind == kind] if journal.exists() else []

    def stored(self) -> list[int]:
        return [m.step for m in Store(self.store).list_checkpoints().checkpoints]


@pytest.fixture
def home(tmp_path: Path) -> Any:
    made = Home(tmp_path)
    yield made
    for event in made.events("keeper-started"):
        if not made.events("keeper-ended"):
            _kill(event.data["pid"])


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.everyday
def test_the_last_of_quick_steps_is_asked_for_and_written(home: Home) -> None:
    code, out, err = home.end(home.start("asks"))
    assert code == 0, err
    assert json.loads(out) == [STEPS - 1, STEPS - 1]
    assert home.stored()[-1] == STEPS - 1


def test_a_keeper_that_is_killed_over_the_last_checkpoint_does_not_cost_it(home: Home) -> None:
    process = home.start()
    deadline_s = time.monotonic() + PATIENCE_S
    while not home.events("persist-started"):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.001)
    _kill(home.events("keeper-started")[0].data["pid"])
    code, _, err = home.end(process)
    assert code == 0, err
    assert home.stored()[-1] == STEPS - 1
    assert len(home.events("keeper-started")) == 2


@pytest.mark.parametrize("how", ["breaks", "breaks and closes"])
def test_a_last_checkpoint_that_fails_is_no_good_end_and_the_same_command_mends_it(
    home: Home, how: str
) -> None:
    code, _, err = home.end(home.start(how))
    assert code == 1 and f"step, {STEPS - 1}, is not in the store" in err
    home.store.unlink()
    home.store.mkdir()
    code, _, err = home.end(home.start())
    assert code == 0, err
    assert home.stored() == [STEPS - 1]
    assert [e.data["step"] for e in home.events("restored")] == [STEPS - 1]
