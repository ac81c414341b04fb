"""Witness: what can only be done and seen from outside the ranks.

Comes in: the faults, and where the job's memory, notes and journal are. Goes out: `Facts`: which processes were stopped or gone, what
slots said after a death, what filesystems had left. Each fault has a small generator that waits, strikes and follows; `look`
advances them all. Never speaks to the job.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.edge.arena import Slot, slot_paths
from keepstep.edge.journal import read_journal
from keepstep.edge.status import StatusPage, status_path
from keepstep.errors import DamageError
from keepstep.model.events import Event
from keepstep.model.snapshot import Phase, RankStatus, SlotState
from keepstep.testing.faults import Fault
from keepstep.testing.injector import kill_keeper, note

STOPPED_S = 0.3  # how long a stopped rank stays before it is killed


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


def process_state(pid: int) -> str:
    """The letter /proc gives (`R`, `S`, `T` stopped, `Z` dead and not yet collected ...); empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_dead(pid: int) -> bool:
    return process_state(pid) in ("", "Z", "X")


class Witness:
    """One run's. `pages` are the ranks' status pages as far as they exist yet."""

    def __init__(self, faults: tuple[Fault, ...], nproc: int, facts: Facts, job_dir: Path, attempts: Path, journal: Path) -> None:
        self._faults, self._nproc, self._facts = faults, nproc, facts
        self._job_dir, self._attempts, self._journal = job_dir, attempts, journal
        self._pages: dict[int, StatusPage] = {}
        self._heard_bytes = 0
        self._watches: dict[int, Iterator[None]] = {n: self._strike(n, f) for n, f in enumerate(faults) if f.from_outside}
        self.statuses: dict[tuple[int, int], RankStatus] = {}  # the last word of each life: (rank, incarnation)

    def look(self) -> None:
        """Once every few milliseconds."""
        for rank in range(self._nproc):
            status = self._page(rank)
            if status is not None:
                self.statuses[(rank, status.incarnation)] = status
        self._hear()
        for number, watch in list(self._watches.items()):
            if next(watch, self) is self:
                del self._watches[number]

    def close(self) -> None:
        self._hear()
        for page in self._pages.values():
            page.close()

    def _page(self, rank: int) -> RankStatus | None:
        if rank not in self._pages:
            with suppress(OSError, ValueError):
                self._pages[rank] = StatusPage(status_path(self._job_dir, rank))
        return self._pages[rank].read() if rank in self._pages else None

    def _hear(self) -> None:
        """What was noted since the last look."""
        with suppress(FileNotFoundError), open(self._attempts, "rb") as file:
            file.seek(self._heard_bytes)
            lines = file.read().splitlines(keepends=True)
            for line in (ln for ln in lines if ln.endswith(b"\n")):
                self._heard_bytes += len(line)
                self._take(json.loads(line))

    def _take(self, said: dict[str, Any]) -> None:
        self._facts.notes.append(said)
        number = int(said["fault"])
        if said["what"] == "cannot":
            self._facts.cannot[number] = said["why"]
        elif said["what"] == "did" and not self._faults[number].from_outside:
            self._watches[number] = self._follow(number, self._faults[number], said)

    def _saw(self, number: int, what: str) -> None:
        self._facts.sightings.setdefault(number, []).append(what)

    def _told(self, number: int, key: str) -> Any:
        return next((n[key] for n in self._facts.notes if n["fault"] == number and key in n), None)

    # -- faults from outside

    def _strike(self, number: int, fault: Fault) -> Iterator[None]:
        """Wait for the moment, do it, and follow what becomes of it."""
        assert fault.after_ms is not None
        while True:
            while (status := self._page(fault.rank)) is None or is_dead(status.pid) or not self._is_moment(number, fault, status):
                yield
            at = time.monotonic() + fault.after_ms / 1000
            while time.monotonic() < at:
                yield
            if is_dead(status.pid):
                continue  # another fault was quicker: the next life's moment, then
            note(self._attempts, number, "about to", pid=status.pid, phase=status.phase.name.lower(), step=status.step)
            try:
                said = self._do(fault, status.pid)
            except ProcessLookupError:
                continue
            except OSError as error:
                note(self._attempts, number, "cannot", why=f"{type(error).__name__}: {error}")
                return
            note(self._attempts, number, "did", **said)
            yield from self._follow(number, fault, said)
            return

    def _do(self, fault: Fault, pid: int) -> dict[str, int]:
        if fault.kind == "keeper-kill":
            return {"keeper_pid": kill_keeper(self._job_dir)}
        os.kill(pid, signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
        return {"pid": pid}

    def _is_moment(self, number: int, fault: Fault, status: RankStatus) -> bool:
        if fault.phase == "restore":
            return status.phase is Phase.RESTORE and any(n["fault"] == number - 1 and n["what"] != "about to" for n in self._facts.notes)
        return status.step >= fault.step and status.phase not in (Phase.RESTORE, Phase.STARTING, Phase.DONE)

    # -- what becomes of a fault

    def _follow(self, number: int, fault: Fault, said: dict[str, Any]) -> Iterator[None]:
        if fault.kind == "keeper-kill":
            yield from self._until_gone(number, int(said["keeper_pid"]), "keeper process")
        elif fault.kind == "full":
            yield from self._follow_full(number, fault, Path(said["filler"]))
        else:
            pid = int(said.get("pid") or self._told(number, "pid"))
            if fault.kind == "stop":
                yield from self._end_stopped(number, pid)
            yield from self._until_gone(number, pid, "process")
            if fault.kind == "torn":
                self._look_for_torn(number, fault.rank)

    def _until_gone(self, number: int, pid: int, what: str) -> Iterator[None]:
        while not is_dead(pid):
            yield
        self._saw(number, f"{what} {pid} is gone")

    def _end_stopped(self, number: int, pid: int) -> Iterator[None]:
        while (state := process_state(pid)) not in ("T", "Z", ""):
            yield
        if state == "T":
            self._saw(number, f"process {pid} is stopped (state T)")
        until = time.monotonic() + STOPPED_S
        while time.monotonic() < until:
            yield
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _look_for_torn(self, number: int, rank: int) -> None:
        for path in slot_paths(self._job_dir, rank):
            with suppress(OSError, DamageError):
                slot = Slot(path)
                header = slot.header()
                slot.close()
                if header.state is SlotState.WRITING:
                    self._saw(number, f"{path.name} of rank {rank} was left with a payload of {header.stamp} and no seal")

    def _follow_full(self, number: int, fault: Fault, filler: Path) -> Iterator[None]:
        if os.statvfs(filler.parent).f_bavail == 0:
            self._saw(number, f"{filler.parent} has 0 bytes free")
        began_ns = int(self._told(number, "mono_ns"))
        answer = "persist-failed" if fault.where == "store" else "resumed"
        while not any(e.kind == answer and e.mono_ns > began_ns for e in read_journal(self._journal)):
            yield
        filler.unlink(missing_ok=True)  # what follows may go well again
