"""A value that is not finite, once, on a device: the snapshot's look finds it there, the step is
taken back and run again, and the training ends in the bits of one in which nothing was wrong.
Skipped without CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keepstep.edge.os.journal import read_journal
from tests.gpu.started import ended

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def outcome(home: Path, poison: str) -> tuple[str, list[str]]:
    """The hash that it ends with, and the kinds of what its journal says."""
    job = poison.replace(" ", "-") or "calm"
    arena, state = home / "arena", home / "state"
    arena.mkdir(exist_ok=True)
    done = ended("poisoned", arena, job, KEEPSTEP_STATE_DIR=str(state), POISON=poison)
    assert done.returncode == 0, done.stderr
    journal = state / job / "journal.jsonl"
    return done.stdout.splitlines()[-1], [event.kind for event in read_journal(journal)]


@pytest.mark.parametrize("what", ["weight", "moment"])
def test_what_is_not_finite_once_is_undone(tmp_path: Path, what: str) -> None:
    calm, quiet = outcome(tmp_path, "")
    assert "wrong-numbers" not in quiet
    found, told = outcome(tmp_path, f"5 {what}")
    assert "wrong-numbers" in told and found == calm
