"""A value that is not finite, once, on a device: the snapshot's look finds it there, the step is
taken back and run again, and the training ends in the bits of one in which nothing was wrong.
Skipped without CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keepstep.edge.os.journal import read_journal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

ROOT = Path(__file__).parents[2]


def ended(home: Path, poison: str) -> tuple[str, list[str]]:
    """The hash that it ends with, and the kinds of what its journal says."""
    job = poison.replace(" ", "-") or "calm"
    (home / "arena").mkdir(exist_ok=True)
    environ = {
        **os.environ,
        "KEEPSTEP_JOB": job,
        "KEEPSTEP_ARENA_DIR": str(home / "arena"),
        "KEEPSTEP_STATE_DIR": str(home / "state"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "POISON": poison,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.poisoned"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    journal = home / "state" / job / "journal.jsonl"
    return done.stdout.splitlines()[-1], [event.kind for event in read_journal(journal)]


@pytest.mark.parametrize("what", ["weight", "moment"])
def test_what_is_not_finite_once_is_undone(tmp_path: Path, what: str) -> None:
    calm, quiet = ended(tmp_path, "")
    assert "wrong-numbers" not in quiet
    found, told = ended(tmp_path, f"5 {what}")
    assert "wrong-numbers" in told and found == calm
