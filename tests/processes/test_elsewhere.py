"""A job that went on elsewhere: what it left in the memory of a node does not beat its store when
it comes back there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.edge.os.journal import read_journal

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import hashlib, os, signal, sys, torch, keepstep
steps, kill_at = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
weight = torch.zeros(1000)
job = keepstep.protect(weight=weight)
print("from", job.step)
for step in job.steps(steps):
    weight += torch.randn(1000)
    assert job._drain(job._rank.drain, 30)
    if step == kill_at:
        job.persist(wait=True)
        os.kill(os.getpid(), signal.SIGKILL)
print("hash", hashlib.sha256(weight.numpy().tobytes()).hexdigest())
"""


class Machines:
    """Two of them with one store: each has a memory and a journal of its own."""

    def __init__(self, room: Path) -> None:
        self.room = room
        room.mkdir()
        (room / "train.py").write_text(PROGRAM)

    def run(self, machine: str, steps: int, kill_at: int = -1) -> str:
        """What the program says there; a killed one takes its keeper along, as a cgroup does."""
        arena, state = self.room / machine / "arena", self.room / machine / "state"
        arena.mkdir(parents=True, exist_ok=True)
        environ = {
            **os.environ,
            "KEEPSTEP_JOB": "j",
            "KEEPSTEP_ARENA_DIR": str(arena),
            "KEEPSTEP_STATE_DIR": str(state),
            "KEEPSTEP_STORE": str(self.room / "store"),
            "KEEPSTEP_PERSIST_EVERY_STEPS": "0",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(self.room / "train.py"), str(steps), str(kill_at)]
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert ended.returncode == (-9 if kill_at >= 0 else 0), ended.stderr
        if kill_at >= 0:
            journal = read_journal(state / "j" / "journal.jsonl")
            keeper = [e.data["pid"] for e in journal if e.kind == "keeper-started"][-1]
            os.kill(keeper, signal.SIGKILL)
        return ended.stdout


def test_memory_that_was_left_behind_does_not_beat_the_store(tmp_path: Path) -> None:
    undisturbed = Machines(tmp_path / "alone")
    machines = Machines(tmp_path / "two")
    end = undisturbed.run("a", 30).splitlines()[-1]
    machines.run("a", 30, kill_at=8)
    assert "from 7\n" in machines.run("b", 30, kill_at=20)
    back = machines.run("a", 30)
    assert "from 19\n" in back, "not from the step 8 that this memory holds"
    assert back.splitlines()[-1] == end
