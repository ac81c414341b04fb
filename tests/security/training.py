"""A training in a plain process, on a machine of its own: what the tests here attack."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keepstep.edge.os.journal import read_journal
from keepstep.edge.store.store import Store
from keepstep.model.events import Event

PATIENCE_S = 100.0
PROGRAM = """
import os, pathlib, sys, torch, keepstep
room, steps, held = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
weights = torch.zeros(1000)
in_code = {"secret": os.environ["IN_CODE"]} if "IN_CODE" in os.environ else None
job = keepstep.protect(in_code, weights=weights)
for step in job.steps(steps):
    assert job._drain(job._rank.drain, 60), "such short steps end before their copies"
    weights += 1
    if step == held:
        (room / "held").touch()
        with open(room / "go-on") as until_it_is_opened:
            until_it_is_opened.read()
    if step and "EVERY" in os.environ and step % int(os.environ["EVERY"]) == 0:
        job.persist(wait=True)  # the step before this one
assert weights.eq(steps).all()
"""


def until(look: Callable[[], Any], what: str) -> Any:
    """What is found, within a deadline."""
    deadline, tick = time.monotonic() + PATIENCE_S, threading.Event()
    while time.monotonic() < deadline:
        if found := look():
            return found
        tick.wait(0.02)
    raise AssertionError(f"{what} did not come within {PATIENCE_S:.0f} s")


class Training:
    """Starts the program; `end` waits for it. `machine` is what is lost by `lose`."""

    def __init__(self, room: Path, store: str, job: str = "t", **environ: str) -> None:
        self.room = room
        (room / "arena").mkdir(parents=True)
        os.mkfifo(room / "go-on")
        (room / "train.py").write_text(PROGRAM)
        self.environ: Mapping[str, str] = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "KEEPSTEP_JOB": job,
            "KEEPSTEP_ARENA_DIR": str(room / "arena"),
            "KEEPSTEP_STATE_DIR": str(room / "state"),
            "KEEPSTEP_STORE": store,
            "KEEPSTEP_PERSIST_EVERY_STEPS": "0",
            "KEEPSTEP_GRACE_S": "0",
            **environ,
        }
        self._job = job

    def start(self, steps: int, held: int = -1, **environ: str) -> subprocess.Popen[str]:
        """Of so many steps; it waits in `held` until it is let go on."""
        (self.room / "held").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, str(self.room / "train.py"), str(self.room), str(steps), str(held)],
            env={**self.environ, **environ},
            cwd=self.room,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def hold(self) -> None:
        """Until it waits in its step."""
        until((self.room / "held").exists, "the step in which it waits")

    def go_on(self) -> None:
        (self.room / "go-on").write_text("")

    def end(self, within_s: float = PATIENCE_S) -> tuple[int, str]:
        """Its exit code, and what it said."""
        _, said = self.process.communicate(timeout=within_s)
        return self.process.returncode, said

    def train(self, steps: int, **environ: str) -> tuple[int, str]:
        self.start(steps, **environ)
        return self.end()

    def events(self, kind: str) -> list[Event]:
        journal = self.room / "state" / self._job / "journal.jsonl"
        if not journal.exists():
            return []
        return [event for event in read_journal(journal) if event.kind == kind]

    def wait_for(self, kind: str, count: int = 1) -> Event:
        event: Event = until(lambda: self.events(kind)[count - 1 : count], f"{count} {kind}")[0]
        return event

    def lose(self) -> None:
        """The machine is gone, with all processes and its memory."""
        pids = [event.data["pid"] for event in self.events("keeper-started")]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if str(self.room) in Path(f"/proc/{pid}/environ").read_text(errors="replace"):
                    os.kill(pid, signal.SIGKILL)
        if hasattr(self, "process") and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        shutil.rmtree(self.room / "arena")
        (self.room / "arena").mkdir()


def stored(directory: Path) -> list[int]:
    """The steps that a job would go on from, newest first."""
    return [manifest.step for manifest in Store(directory).list_checkpoints().checkpoints]


def inspect(store: str) -> tuple[int, str]:
    """`keepstep inspect --store S --verify`."""
    return command("inspect", "--store", store, "--verify")


def command(*words: str, **environ: str) -> tuple[int, str]:
    """`keepstep` and these words: its exit code, and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", *words],
        env={**os.environ, "COLUMNS": "400", **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout + done.stderr
