"""Conductor: runs the drill's job in real processes, does what can only be done from outside, and looks.

Comes in: a `Drill` (the job's parameters and the faults). Goes out: `Facts`, everything that was seen: exit codes, digests,
processes that were gone or stopped, what slots said after a death, the journal, what was left behind. Judges nothing (verdict.py).

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keepstep.config import Config
from keepstep.edge.arena import Slot, slot_paths
from keepstep.edge.journal import read_journal
from keepstep.edge.status import StatusPage, status_path
from keepstep.errors import DamageError
from keepstep.model.events import Event
from keepstep.model.snapshot import Phase, RankStatus, SlotState
from keepstep.model.units import MIB
from keepstep.testing.faults import Fault, to_plan
from keepstep.testing.injector import attempted, kill_keeper, note

LAUNCHERS = ("run", "torchrun", "plain")
STOPPED_S = 0.3  # how long a stopped rank stays before it is killed
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
        parts = [self.nproc, self.steps, self.seed, self.width, Path(__file__).with_name("job.py").read_text()]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


@dataclass
class Facts:
    """What was seen. `cannot`: faults that could not be done, and why. `sightings`: what the conductor saw of each fault itself."""

    job: str
    exit_code: int | None = None  # of the launcher; None: it had to be stopped
    digests: dict[int, str] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)
    cannot: dict[int, str] = field(default_factory=dict)
    sightings: dict[int, list[str]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"captured_steps": 0, "skipped_steps": 0, "torn_steps": 0})
    left_over: list[str] = field(default_factory=list)
    log: str = ""

    @property
    def hash(self) -> str | None:
        """One digest of all ranks; None when one is missing."""
        if not self.digests:
            return None
        return hashlib.sha256("".join(self.digests[r] for r in sorted(self.digests)).encode()).hexdigest()


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


def process_state(pid: int) -> str:
    """The letter /proc gives (`R`, `S`, `T` stopped, `Z` dead and not yet collected ...); empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_dead(pid: int) -> bool:
    return process_state(pid) in ("", "Z", "X")


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
        self.pages: dict[int, StatusPage] = {}
        self.deadly = sum(f.ends_a_rank for f in drill.faults)
        self.watches: dict[int, Iterator[None]] = {}  # one a fault, advanced every few milliseconds
        self.counts: dict[tuple[int, int], RankStatus] = {}

    def go(self, progress: Progress) -> None:
        deadline = time.monotonic() + 60 + 5 * self.drill.steps * max(self.drill.step_ms, 10) / 1000 + RESTART_S * self.deadly
        self._write_plan()
        for number, fault in enumerate(self.drill.faults):
            if fault.from_outside:
                self.watches[number] = self._strike(number, fault)
        tick_s = 0.001 if self.watches else 0.01
        with open(self.room / "job.log", "ab") as log:
            child = self._start(log)
            restarts = 0
            try:
                while time.monotonic() < deadline:
                    self._look()
                    progress(max((s.completed_step for s in self.counts.values()), default=-1), len({n["fault"] for n in self.facts.notes}))
                    code = child.poll()
                    if code is not None and code != 0 and self.drill.launcher == "plain" and restarts < self.deadly + 3:
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

    # -- looking and striking

    def _look(self) -> None:
        for rank in range(self.drill.nproc):
            status = self._page(rank)
            if status is not None:
                self.counts[(rank, status.incarnation)] = status
        self._read_notes()
        for number, watch in list(self.watches.items()):
            if next(watch, self) is self:
                del self.watches[number]

    def _page(self, rank: int) -> RankStatus | None:
        if rank not in self.pages:
            with suppress(OSError, ValueError):
                self.pages[rank] = StatusPage(status_path(self.job_dir, rank))
        return self.pages[rank].read() if rank in self.pages else None

    def _read_notes(self) -> None:
        if not self.attempts.exists():
            return
        lines = self.attempts.read_text().splitlines()
        for line in lines[len(self.facts.notes) :]:
            said = json.loads(line)
            self.facts.notes.append(said)
            number = int(said["fault"])
            if said["what"] == "cannot":
                self.facts.cannot[number] = said["why"]
            elif said["what"] == "did" and not self.drill.faults[number].from_outside:
                self.watches[number] = self._witness(number, self.drill.faults[number], said)

    def _saw(self, number: int, what: str) -> None:
        self.facts.sightings.setdefault(number, []).append(what)

    def _told(self, number: int, key: str) -> Any:
        return next((n[key] for n in self.facts.notes if n["fault"] == number and key in n), None)

    def _strike(self, number: int, fault: Fault) -> Iterator[None]:
        """A fault from outside: wait for its moment, then do it."""
        assert fault.after_ms is not None
        while True:
            while (status := self._page(fault.rank)) is None or is_dead(status.pid) or not self._is_moment(number, fault, status):
                yield
            at = time.monotonic() + fault.after_ms / 1000
            while time.monotonic() < at:
                yield
            if not is_dead(status.pid):
                break
        note(self.attempts, number, "about to", pid=status.pid, phase=status.phase.name.lower(), step=status.step)
        said: dict[str, Any] = {"pid": status.pid}
        if fault.kind == "keeper-kill":
            try:
                said = {"keeper_pid": kill_keeper(self.job_dir)}
            except OSError as error:
                note(self.attempts, number, "cannot", why=f"no keeper answered: {error}")
                return
        else:
            os.kill(status.pid, signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
        note(self.attempts, number, "did", **said)
        yield from self._witness(number, fault, said)

    def _is_moment(self, number: int, fault: Fault, status: RankStatus) -> bool:
        if fault.phase == "restore":
            return status.phase is Phase.RESTORE and number - 1 in attempted(self.attempts)
        return status.step >= fault.step and status.phase not in (Phase.RESTORE, Phase.STARTING, Phase.DONE)

    def _witness(self, number: int, fault: Fault, said: dict[str, Any]) -> Iterator[None]:
        """Look at what became of a fault, until it is seen."""
        if fault.kind == "keeper-kill":
            while not is_dead(said["keeper_pid"]):
                yield
            self._saw(number, f"keeper process {said['keeper_pid']} is gone")
            return
        if fault.kind == "full":
            yield from self._witness_full(number, fault, Path(said["filler"]))
            return
        pid = int(said.get("pid") or self._told(number, "pid"))
        if fault.kind == "stop":
            while (state := process_state(pid)) not in ("T", "Z", ""):
                yield
            if state == "T":
                self._saw(number, f"process {pid} is stopped (state T)")
            until = time.monotonic() + STOPPED_S
            while time.monotonic() < until:
                yield
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while not is_dead(pid):
            yield
        self._saw(number, f"process {pid} is gone")
        if fault.kind == "torn":
            self._look_at_torn(number, fault.rank)

    def _look_at_torn(self, number: int, rank: int) -> None:
        for path in slot_paths(self.job_dir, rank):
            with suppress(OSError, DamageError):
                slot = Slot(path)
                header = slot.header()
                slot.close()
                if header.state is SlotState.WRITING:
                    self._saw(number, f"{path.name} of rank {rank} was left with a payload of {header.stamp} and no seal")

    def _witness_full(self, number: int, fault: Fault, filler: Path) -> Iterator[None]:
        free = os.statvfs(filler.parent)
        if free.f_bavail == 0:
            self._saw(number, f"{filler.parent} has 0 bytes free")
        began_ns = int(self._told(number, "mono_ns"))
        answer = "persist-failed" if fault.where == "store" else "resumed"
        while not any(e.kind == answer and e.mono_ns > began_ns for e in read_journal(self.journal)):
            yield
        filler.unlink(missing_ok=True)  # what follows may go well again

    # -- ending

    def _remains(self) -> list[str]:
        return sorted(str(p) for p in self.drill.arena_dir.glob(f"keepstep-{self.facts.job}*"))

    def _wait_for_removal(self) -> None:
        until = time.monotonic() + REMOVAL_S
        while self._remains() and time.monotonic() < until:
            self._look()
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
        for page in self.pages.values():
            page.close()
        for remains in self._remains():
            shutil.rmtree(remains, ignore_errors=True)

    def _collect(self) -> None:
        facts = self.facts
        self._read_notes()
        facts.events = list(read_journal(self.journal))
        for rank in range(self.drill.nproc):
            with suppress(FileNotFoundError):
                facts.digests[rank] = json.loads((self.results / f"rank-{rank}.json").read_text())["digest"]
        if len(facts.digests) < self.drill.nproc:
            facts.digests = {}
        for status in self.counts.values():
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
