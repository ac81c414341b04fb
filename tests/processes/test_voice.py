"""Voice: a training in a plain process says what is protected, where it goes on and how it ended,
in three lines on stderr, and no more than it was asked for."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.edge.os.journal import read_journal
from keepstep.edge.store.store import Store
from keepstep.model.events import Event

TRAINING = """
import logging, os, signal, sys, torch, keepstep
if "own" in sys.argv:
    logging.getLogger("keepstep").addHandler(logging.StreamHandler(sys.stdout))
weights = torch.zeros(10)
job = keepstep.protect(weights=weights, seen={"rows": 0})
for step in job.steps(6):
    weights += 1
    if step == 2 and "breaks" in sys.argv:
        os.rmdir(os.environ["KEEPSTEP_STORE"])
        open(os.environ["KEEPSTEP_STORE"], "w").close()
    if step == 4 and "killed" in sys.argv:
        assert job._drain(job._rank.drain, 60), "such short steps end before their copies"
        os.kill(os.getpid(), signal.SIGKILL)
assert weights.eq(6).all()
"""


def train(home: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (home / "arena").mkdir(exist_ok=True)
    (home / "train.py").write_text(TRAINING)
    places = {"KEEPSTEP_ARENA_DIR": f"{home}/arena", "KEEPSTEP_STATE_DIR": f"{home}/state"}
    return subprocess.run(
        [sys.executable, str(home / "train.py"), *words],
        env={**os.environ, **places, "KEEPSTEP_JOB": "t", "KEEPSTEP_GRACE_S": "60", **environ},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.everyday
def test_three_lines_and_the_next_run_says_that_it_goes_on(tmp_path: Path) -> None:
    killed = train(tmp_path, "killed")
    assert killed.returncode == -signal.SIGKILL
    protected, position = killed.stderr.splitlines()
    assert "job t (KEEPSTEP_JOB or --job names another) is protected: " in protected
    assert "weights (tensor), seen (value), random states; " in protected
    assert "KEEPSTEP_FRESH=1" in protected and "begins at step 0: memory holds nothing" in position
    again = train(tmp_path)
    protected, position, summary = again.stderr.splitlines()
    assert "goes on with the run before: resumed step " in position and " from memory, " in position
    assert " captured, " in summary and summary.endswith("; no store")


def test_a_fresh_start_says_so_and_a_summary_what_is_stored(tmp_path: Path) -> None:
    train(tmp_path, "killed", KEEPSTEP_LOG="quiet")
    store = tmp_path / "store"
    afresh = train(tmp_path, KEEPSTEP_FRESH="1", KEEPSTEP_STORE=str(store))
    _, position, summary = afresh.stderr.splitlines()
    assert "begins at step 0: a fresh start was asked for" in position
    assert "; the newest checkpoint is of step " in summary


@pytest.mark.timeout(400)
def test_what_a_fresh_start_leaves_in_the_store_is_kept_and_not_taken(tmp_path: Path) -> None:
    """Even when the machine is lost before the new run has stored anything."""
    store = tmp_path / "store"
    first = train(tmp_path, KEEPSTEP_STORE=str(store))
    assert first.returncode == 0 and [m.step for m in Store(store).published()] == [5]
    killed = train(
        tmp_path, "killed", KEEPSTEP_FRESH="1", KEEPSTEP_STORE=str(store), KEEPSTEP_GRACE_S="0"
    )
    assert killed.returncode == -signal.SIGKILL
    pids = {event.data["pid"] for event in _events(tmp_path, "keeper-started")}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(tmp_path / "arena")
    again = train(tmp_path, KEEPSTEP_STORE=str(store))
    assert "begins at step 0" in again.stderr and again.returncode == 0
    assert [m.step for m in Store(store).published()] == [5], "the first run's is kept"
    assert [m.step for m in Store(store / "run-000002").published()] == [5]
    done = train(tmp_path, KEEPSTEP_STORE=str(store))
    assert "step 5 was done before" in done.stderr, "the newest run's is taken"
    assert len(_events(tmp_path, "run-begun")) == 1


def _events(home: Path, kind: str) -> list[Event]:
    return [e for e in read_journal(home / "state" / "t" / "journal.jsonl") if e.kind == kind]


def test_no_more_than_was_asked_for(tmp_path: Path) -> None:
    assert train(tmp_path, KEEPSTEP_LOG="quiet").stderr == ""
    everything = train(tmp_path, KEEPSTEP_LOG="debug").stderr
    assert len(everything.splitlines()) > 3 and " says goodbye" not in everything
    own = train(tmp_path, "own")
    assert own.stderr == "", "the program shows the log its own way"


def test_a_store_that_is_named_later_is_used(tmp_path: Path) -> None:
    train(tmp_path, "killed")
    store = tmp_path / "store"
    again = train(tmp_path, KEEPSTEP_STORE=str(store))
    assert "goes on with the run before: resumed step " in again.stderr
    assert [path.name for path in store.iterdir() if path.name.startswith("step-")] != []
    assert "; the newest checkpoint is of step " in again.stderr.splitlines()[-1]


def test_a_checkpoint_that_fails_is_an_error_at_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    lines = train(tmp_path, "breaks", KEEPSTEP_STORE=str(store)).stderr.splitlines()
    assert [line for line in lines if ", is not in the store: " in line] != []
