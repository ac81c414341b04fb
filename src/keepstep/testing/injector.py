"""Injector: the hand inside a rank that does the fault.

Listens to the phases the job and keepstep announce. That a fault is about to be done, and that it
was, goes to an append-only file that outlives the rank, so that no later life does it again and the
drill knows that it was tried. What proves that it happened is seen from outside (verdict.py), never
told from here.

Invariant: what a fault needs is waited for, however fast the steps are: a checkpoint is asked for
only when there is a keeper that hears it.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.config import job_dir_of
from keepstep.core.wire.conversations import AGENT_WITH_KEEPER
from keepstep.edge.net.unix_socket import Mailbox
from keepstep.edge.os.journal import JournalTail, read_journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import slot_paths
from keepstep.edge.shm.status_page import StatusPage, status_path
from keepstep.edge.store.store import Store
from keepstep.model.snapshot import Phase, SlotState
from keepstep.model.units import MIB
from keepstep.testing.faults import AGENT_KILL, Fault, from_plan
from keepstep.testing.flips import draw_in_file, draw_in_slot, sealed_slots
from keepstep.testing.lines import Lines, append
from keepstep.testing.processes import is_dead

FILLER = "keepstep-drill-filler"
WRITING_PATIENCE_S = 5.0
ASKS = "asks"  # for its whole node to be lost
LOSS_PATIENCE_S = 10.0
KEEPER_PATIENCE_S = 20.0  # on a busy machine the next keeper may take seconds to be there


@dataclass(frozen=True)
class FaultPlan:
    """What a drill hands to its job: the faults, and where everything is. `node`: the job's number
    of the node this process is on.

    `later`: where faults are told while the job runs, one a line; their numbers go on from those of
    `faults`. `phases`: where a stopwatch is to write."""

    faults: tuple[Fault, ...]
    seed: int
    attempts: Path
    job_dir: Path
    journals: tuple[Path, ...]
    store: Path | None
    node: int = 0
    later: Path | None = None
    phases: Path | None = None

    @classmethod
    def read(cls, path: Path, environ: Mapping[str, str]) -> FaultPlan:
        raw = json.loads(path.read_text())
        store = None if raw["store"] is None else Path(raw["store"])
        job_dir = job_dir_of(Path(environ["KEEPSTEP_ARENA_DIR"]), raw["job"])
        journals = tuple(map(Path, raw["journals"]))
        node = int(environ.get("GROUP_RANK", "0"))
        later, phases = (
            None if raw.get(key) is None else Path(raw[key]) for key in ("later", "phases")
        )
        return cls(
            from_plan(raw["faults"]),
            raw["seed"],
            Path(raw["attempts"]),
            job_dir,
            journals,
            store,
            node,
            later,
            phases,
        )

    def falls_to(self, fault: Fault, rank: int, local_rank: int) -> bool:
        """Whether that rank does the fault, or asks for it: for what happens to nodes, the first
        rank of the first one."""
        if fault.from_outside:
            return False
        return (fault.nodes[0], 0) == (self.node, local_rank) if fault.nodes else fault.rank == rank


def note(attempts: Path, number: int, what: str, **data: Any) -> None:
    """One line that outlives this process. what: `asks`, `about to`, `did` or `cannot`; `ended` a
    stopped rank."""
    append(attempts, {"fault": number, "what": what, "mono_ns": time.monotonic_ns(), **data})


def attempted(attempts: Path) -> set[int]:
    """The faults that were done, or could not be, in any life. One that another fault's kill came
    before is still to be done."""
    return {
        said["fault"] for said in Lines(attempts).new() if said["what"] not in (ASKS, "about to")
    }


class Injector:
    """A phase listener: `session.phase_listeners.append(Injector(plan, rank))` before `protect`."""

    def __init__(self, plan: FaultPlan, rank: int, local_rank: int = 0) -> None:
        self._plan, self._rank, self._local_rank = plan, rank, local_rank
        self._mine: dict[int, Fault] = {}
        self._known = 0
        self._later = None if plan.later is None else Lines(plan.later)
        self._learn(plan.faults)
        self._learn_later()
        for number in attempted(plan.attempts):
            self._mine.pop(number, None)
        self._armed: set[int] = set()
        self._lock = threading.Lock()

    def _learn(self, faults: Sequence[Fault]) -> None:
        for number, fault in enumerate(faults, self._known):
            is_others = fault.is_number or fault.is_slowness
            if not is_others and self._plan.falls_to(fault, self._rank, self._local_rank):
                self._mine[number] = fault
        self._known += len(faults)

    def _learn_later(self) -> None:
        if self._later is not None:
            self._learn(from_plan(self._later.new()))

    def __call__(self, phase: Phase, step: int) -> None:
        with self._lock:  # phases are announced by the trainer's thread and by the capture thread
            self._learn_later()
            due = [(n, f) for n, f in self._mine.items() if self._is_due(n, f, phase, step)]
            for number, _ in due:
                del self._mine[number]
        if phase is Phase.PERSIST and due:
            self.await_keeper()
        for number, fault in due:
            if fault.phase == "persist" and phase is Phase.PERSIST and fault.kind != "full":
                begun = Begun(self._plan.journals, step)
                threading.Thread(
                    target=self._when_writing, args=(number, fault, step, begun), daemon=True
                ).start()
            else:
                self._act(number, fault, phase, step)

    def _is_due(self, number: int, fault: Fault, phase: Phase, step: int) -> bool:
        if fault.kind == "torn" and phase is Phase.SEAL and number in self._armed:
            return True
        if phase.name.lower() != fault.phase:
            return False
        # A restore is the recovery from the fault before it.
        reached = (
            number - 1 in attempted(self._plan.attempts)
            if phase is Phase.RESTORE
            else step >= fault.step
        )
        if reached and fault.kind == "torn" and phase is not Phase.SEAL:
            self._armed.add(number)  # between payload and header is only one moment: the next seal
            return False
        return reached

    def await_keeper(self) -> None:
        """Return when there is a keeper that hears this rank, or after a while without one: it
        would not be asked for a checkpoint, nor remove the memory when the job ends."""
        deadline = time.monotonic() + KEEPER_PATIENCE_S
        while not is_attached(self._plan.journals, self._rank) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _when_writing(self, number: int, fault: Fault, step: int, begun: Begun) -> None:
        """The announcement comes before the request: wait until the persister is at work. Another
        rank may have asked for it already."""
        deadline = time.monotonic() + WRITING_PATIENCE_S
        while not begun.look() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._act(number, fault, Phase.PERSIST, step)

    def _ask(self, number: int, fault: Fault, phase: Phase, step: int) -> None:
        """Somebody outside has to do it. This is the moment: without `after` the node is lost while
        this thread waits here."""
        note(self._plan.attempts, number, ASKS, phase=phase.name.lower(), step=step)
        if fault.kind == "kill-node" and fault.after_ms is None:
            time.sleep(LOSS_PATIENCE_S)

    def _act(self, number: int, fault: Fault, phase: Phase, step: int) -> None:
        if fault.nodes:
            self._ask(number, fault, phase, step)
            return
        note(
            self._plan.attempts,
            number,
            "about to",
            pid=os.getpid(),
            phase=phase.name.lower(),
            step=step,
        )
        try:
            told = self._do(number, fault)
        except (LookupError, OSError) as error:
            note(self._plan.attempts, number, "cannot", why=f"{type(error).__name__}: {error}")
            return
        note(self._plan.attempts, number, "did", **told)
        if fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.ends_a_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def _do(self, number: int, fault: Fault) -> dict[str, Any]:
        if fault.kind == "keeper-kill":
            return {"keeper_pid": kill_keeper(self._plan.job_dir)}
        if fault.kind == AGENT_KILL:
            return {"agent_pid": kill_agent(self._plan.job_dir)}
        if fault.kind == "flip":
            return self._flip(random.Random(f"{self._plan.seed}/{number}"), fault)
        if fault.kind == "full":
            where = self._plan.job_dir.parents[1] if fault.where == "arena" else self._plan.store
            assert where is not None
            where.mkdir(parents=True, exist_ok=True)
            return {"filler": str(fill(where))}
        return {}

    def _flip(self, rng: random.Random, fault: Fault) -> dict[str, Any]:
        if fault.phase not in ("capture", "seal"):
            self._settle()
        slots = sealed_slots(slot_paths(MEMORY, self._plan.job_dir, self._rank))
        if not slots:
            raise LookupError(f"expected a sealed slot of rank {self._rank} to damage, found none")
        flips = [
            draw_in_slot(path, rng) for path in (slots if fault.where == "store" else slots[:1])
        ]
        # memory is damaged too, so that the restore has to come to the store
        if fault.where == "store":
            flips.insert(0, draw_in_file(rng.choice(_newest_checkpoint(self._plan.store)), rng))
        for flip in flips:
            flip.turn()
        return {"flips": [str(f) for f in flips], "paths": [str(f.path) for f in flips]}

    def _settle(self) -> None:
        """Wait for the capture thread: what it seals after the flip would be the newest."""
        page = StatusPage(MEMORY, status_path(self._plan.job_dir, self._rank))
        until = time.monotonic() + 1
        while (
            time.monotonic() < until
            and (status := page.read())
            and any(v.state is SlotState.WRITING for v in status.slots)
        ):
            time.sleep(0.001)
        page.close()


def is_attached(journals: Sequence[Path], rank: int) -> bool:
    """Whether the keeper that last heard of this rank lives."""
    heard: list[tuple[int, int]] = []  # (when, keeper's process)
    for path in journals:
        keeper = 0
        for event in read_journal(path):
            if event.kind == "keeper-started":
                keeper = int(event.data["pid"])
            elif event.kind in ("rank-joined", "rank-attached") and event.data["rank"] == rank:
                heard.append((event.mono_ns, keeper))
    return bool(heard) and not is_dead(max(heard)[1])


class Begun:
    """Whether a checkpoint is begun: one of `step` or a newer one, or any after this was made. The
    leading keeper's journal tells."""

    def __init__(self, journals: Sequence[Path], step: int) -> None:
        self._tails = [JournalTail(path) for path in journals]
        self._is_begun = max(self._steps(), default=-1) >= step

    def look(self) -> bool:
        self._is_begun = self._is_begun or bool(self._steps())
        return self._is_begun

    def _steps(self) -> list[int]:
        return [
            event.data["step"]
            for tail in self._tails
            for event in tail.read()
            if event.kind == "persist-started"
        ]


def kill_keeper(job_dir: Path, patience_s: float = KEEPER_PATIENCE_S) -> int:
    """The pid of the one that was killed; one that is just starting is waited for. Raises OSError
    when nobody comes."""
    return _kill_listener(job_dir, "keeper.sock", patience_s)


def kill_agent(job_dir: Path, patience_s: float = KEEPER_PATIENCE_S) -> int:
    """The same of the node's agent."""
    return _kill_listener(job_dir, "agent.sock", patience_s)


def _kill_listener(job_dir: Path, name: str, patience_s: float) -> int:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            box = Mailbox.connect(job_dir / name, patience_s, AGENT_WITH_KEEPER)
            break
        except OSError:
            if not job_dir.exists() or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    pid, _ = box.peer()
    os.kill(pid, signal.SIGKILL)
    box.close()
    return pid


def fill(directory: Path) -> Path:
    """Take every free byte of a filesystem. Raises OSError when it is so large that a drill must
    not."""
    free = os.statvfs(directory)
    if free.f_bavail * free.f_frsize > 512 * MIB:
        raise OSError(
            errno.EPERM,
            f"expected a small filesystem at {directory}, found "
            f"{free.f_bavail * free.f_frsize} bytes free",
        )
    path = directory / FILLER
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    chunk = bytes(MIB)
    try:
        while True:
            try:
                os.write(fd, chunk)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                if len(chunk) == 1:
                    return path
                chunk = chunk[: len(chunk) // 4096 or 1]
    finally:
        os.close(fd)


def _newest_checkpoint(store: Path | None) -> Sequence[Path]:
    assert store is not None
    there = Store(store).follow()
    found = there.list_checkpoints().checkpoints
    if not found:
        raise LookupError(f"expected a checkpoint in {store} to damage, found none")
    directory = Path(there.url(found[0].step))
    return sorted(p for p in directory.iterdir() if p.is_file())
