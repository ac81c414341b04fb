"""Conductor: runs the drill's job in real processes, and undisturbed for comparison.

Comes in: a `Drill` (the job's parameters and the faults). Goes out: `Facts`, everything that was seen: exit code, digests, the
journal, what was left behind, and what the witness saw of the faults. Judges nothing (verdict.py).

Invariant: whatever happens, when `conduct` returns no process of the job lives and nothing of it is in its arena_dir.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from keepstep.config import Config
from keepstep.edge.journal import read_journal
from keepstep.model.units import MIB
from keepstep.testing.faults import Fault, to_plan
from keepstep.testing.witness import Facts, Witness

LAUNCHERS = ("run", "torchrun", "plain")
REMOVAL_S = 20.0  # how long the keeper may take to remove everything after the job's end
RESTART_S = 25.0  # the longest a restart may take on a busy machine
GRACE_S = 30.0

Progress = Callable[[int, int], None]  # step reached, faults done


@dataclass(frozen=True)
class Drill:
    """A job's parameters and what is to happen to it. Everything is kept below `work`."""

    work: Path
    nproc: int = 2
    steps: int = 60
    seed: int = 0
    width: int = 64
    step_ms: float = 20.0
    persist_every: int = 10
    launcher: str = "run"
    store: Path | None = None
    arena_dir: Path = Path("/dev/shm")
    faults: tuple[Fault, ...] = ()

    @property
    def key(self) -> str:
        """Equal for drills whose undisturbed runs end in the same state."""
        parts = [self.nproc, self.steps, self.seed, self.width, version("torch"), Path(__file__).with_name("job.py").read_text()]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def conduct(drill: Drill, progress: Progress = lambda step, done: None) -> Facts:
    """Run the job once, with its faults."""
    facts = Facts(f"drill-{os.urandom(4).hex()}")
    filled = {f.where: drill.work / f.where for f in drill.faults if f.kind == "full"}
    if "arena" in filled:
        drill = replace(drill, arena_dir=filled["arena"])
    if "store" in filled or (drill.store is None and any(f.needs_store for f in drill.faults)):
        drill = replace(drill, store=drill.work / "store")
    with ExitStack() as stack:
        for place, directory in filled.items():
            why = mount_small(directory)
            stack.callback(unmount, directory)
            facts.cannot.update({n: why for n, f in enumerate(drill.faults) if why and (f.kind, f.where) == ("full", place)})
        if not facts.cannot:
            _Run(drill, facts).go(progress)
    return facts


def mount_small(directory: Path) -> str:
    """A filesystem small enough to be filled; the reason when that is not allowed here."""
    directory.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={64 * MIB},mode=0700", "keepstep-drill", str(directory)], capture_output=True, text=True
    )
    return "" if done.returncode == 0 else f"a small filesystem cannot be mounted at {directory}: {done.stderr.strip() or done.returncode}"


def unmount(directory: Path) -> None:
    subprocess.run(["umount", "--lazy", str(directory)], capture_output=True)


class _Run:
    """One run of the job."""

    def __init__(self, drill: Drill, facts: Facts) -> None:
        self.drill, self.facts = drill, facts
        self.room = drill.work / facts.job
        self.results, self.attempts = self.room / "results", self.room / "attempts.jsonl"
        self.results.mkdir(parents=True)
        self.store = None if drill.store is None else drill.store / facts.job
        self.config = Config(
            job=facts.job,
            store=None if self.store is None else str(self.store),
            persist_every_steps=0,
            arena_dir=str(drill.arena_dir),
            state_dir=str(drill.work),
            grace_s=GRACE_S,
        )
        self.job_dir = drill.arena_dir / f"keepstep-{facts.job}"
        self.journal = self.room / "journal.jsonl"
        self.deadly = sum(f.ends_a_rank for f in drill.faults)
        self.witness = Witness(drill.faults, drill.nproc, facts, self.job_dir, self.attempts, self.journal)

    def go(self, progress: Progress) -> None:
        deadline = time.monotonic() + 60 + 5 * self.drill.steps * max(self.drill.step_ms, 10) / 1000 + RESTART_S * self.deadly
        self._write_plan()
        tick_s = 0.001 if any(f.from_outside for f in self.drill.faults) else 0.01
        with open(self.room / "job.log", "ab") as log:
            child = self._start(log)
            restarts = 0
            try:
                while time.monotonic() < deadline:
                    self.witness.look()
                    reached = max((s.completed_step for s in self.witness.statuses.values()), default=-1)
                    progress(reached, len({n["fault"] for n in self.facts.notes}))
                    code = child.poll()
                    if code and self.drill.launcher == "plain" and restarts < self.deadly + 3:
                        child, restarts = self._start(log), restarts + 1
                    elif code is not None:
                        break
                    time.sleep(tick_s)
                self.facts.exit_code = child.poll()
                self._wait_for_removal()
            finally:
                self._end(child)
        self._collect()

    # -- starting

    def _write_plan(self) -> None:
        plan = {
            "faults": to_plan(self.drill.faults),
            "seed": self.drill.seed,
            "attempts": str(self.attempts),
            "job_dir": str(self.job_dir),
            "journal": str(self.journal),
            "store": None if self.store is None else str(self.store),
        }
        (self.room / "plan.json").write_text(json.dumps(plan))

    def _start(self, log: Any) -> subprocess.Popen[bytes]:
        drill = self.drill
        words = [*("--steps", drill.steps), *("--width", drill.width), *("--seed", drill.seed), *("--step-ms", drill.step_ms)]
        words += ["--results", self.results, "--plan", self.room / "plan.json"]
        if self.store is not None:
            words += ["--persist-every", drill.persist_every]
        many = [*("--nproc-per-node", drill.nproc), *("--max-restarts", self.deadly + 3)]
        before: dict[str, list[Any]] = {
            "run": ["-m", "keepstep.cli.main", "run", *many, "-m"],
            "torchrun": ["-m", "torch.distributed.run", "--standalone", *many, "-m"],
            "plain": ["-m"],
        }
        command = [sys.executable, *before[drill.launcher], "keepstep.testing.job", *words]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
        env = {**inherited, "OMP_NUM_THREADS": "1", **self.config.to_env()}
        # torchrun keeps one store over its restarts, where ranks find addresses of the dead (github.com/pytorch/pytorch/issues/135712).
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return subprocess.Popen(
            [str(c) for c in command], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

    # -- ending

    def _remains(self) -> list[str]:
        return sorted(str(p) for p in self.drill.arena_dir.glob(f"keepstep-{self.facts.job}*"))

    def _wait_for_removal(self) -> None:
        until = time.monotonic() + REMOVAL_S
        while self._remains() and time.monotonic() < until:
            self.witness.look()
            time.sleep(0.02)
        self.facts.left_over = self._remains()

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        if child.poll() is None:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        # Ranks and keeper have sessions of their own; the journal knows their ids, and /proc whether they are still ours.
        for pid in {int(e.data["pid"]) for e in read_journal(self.journal) if "pid" in e.data}:
            with suppress(OSError):
                if self.facts.job.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self.witness.close()
        for remains in self._remains():
            shutil.rmtree(remains, ignore_errors=True)

    def _collect(self) -> None:
        facts = self.facts
        facts.events = list(read_journal(self.journal))
        for rank in range(self.drill.nproc):
            with suppress(FileNotFoundError):
                facts.digests[rank] = json.loads((self.results / f"rank-{rank}.json").read_text())["digest"]
        if len(facts.digests) < self.drill.nproc:
            facts.digests = {}
        for status in self.witness.statuses.values():
            for name in facts.counts:
                facts.counts[name] += getattr(status, name)
        facts.log = (self.room / "job.log").read_text(errors="replace")


def reference(drill: Drill, progress: Progress = lambda step, done: None) -> str | None:
    """The hash of the undisturbed run; remembered in `work`, so that drills of one job pay for it once."""
    memo = drill.work / f"reference-{drill.key}.json"
    with suppress(FileNotFoundError):
        return str(json.loads(memo.read_text())["hash"])
    facts = conduct(replace(drill, faults=(), store=None, step_ms=0.0), progress)
    if facts.exit_code != 0 or facts.hash is None:
        return None
    memo.write_text(json.dumps({"hash": facts.hash}))
    return facts.hash
