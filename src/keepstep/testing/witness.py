"""Witness: what can only be done and seen from outside the ranks.

Comes in: the faults, more of them while it runs, and where the memory, notes and journals of each
of the job's nodes are. Goes out: `DrillFacts`: which processes were stopped or gone, what slots
said after a death, what filesystems had left. Each fault has a small generator that waits, strikes
and follows; `look` advances them all. Never speaks to the job.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from keepstep.edge.os.journal import JournalTail
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, ranks_in, slot_paths
from keepstep.edge.shm.status_page import StatusPage, status_path
from keepstep.errors import ConfigError, DamageError
from keepstep.model.events import Event
from keepstep.model.snapshot import Phase, RankStatus, SlotState, Stamp
from keepstep.model.units import MS_NS, S_NS, human_ns
from keepstep.testing import part_faults
from keepstep.testing.crew import CrewPlace
from keepstep.testing.faults import (
    AGENT_KILL,
    ETCD_RESTART,
    HARMED_BITS_PER_S,
    LINK_KINDS,
    LINK_WORDS,
    PART_FAULTS,
    PROTECT,
    STORE_KINDS,
    Fault,
)
from keepstep.testing.injector import ASKS, kill_agent, kill_keeper, note
from keepstep.testing.lines import Lines
from keepstep.testing.network import LinkShape
from keepstep.testing.processes import is_dead, process_state
from keepstep.testing.rough_store import BEHAVIOURS, RoughStore, half_checkpoints

STOPPED_S = 0.3  # how long a stopped rank stays before it is killed
SEARCH_S = 0.02  # how often new ranks are looked for
ROUGH_S = 30.0  # how long a rough store waits for somebody to meet it, and for training to go on


@dataclass
class DrillFacts:
    """What was seen. `cannot`: faults that could not be done, and why. `sightings`: what the
    witness saw of each fault itself. `protected_ns`: when, in each epoch, everything was first seen
    to lie on as many nodes as the policy asks for; `committed`: every such moment, as (epoch, step,
    time). `phases`: a stopwatch's lines. `half`: of checkpoints that count in the store, and are
    not whole, what is wrong."""

    job: str
    nodes: int = 1
    policy: str = "none"
    world_size: int = 0
    exit_code: int | None = None  # of the launcher; None: it had to be stopped
    digests: dict[int, str] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)
    cannot: dict[int, str] = field(default_factory=dict)
    sightings: dict[int, list[str]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: {"captured_steps": 0, "skipped_steps": 0, "torn_steps": 0}
    )
    # by epoch and rank: the last step it was seen to have done
    completed: dict[tuple[int, int], int] = field(default_factory=dict)
    left_over: list[str] = field(default_factory=list)
    protected_ns: dict[int, int] = field(default_factory=dict)
    committed: list[tuple[int, int, int]] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)
    half: list[str] = field(default_factory=list)
    log: str = ""

    @property
    def hash(self) -> str | None:
        """One digest of all ranks; None when one is missing."""
        if not self.digests:
            return None
        return hashlib.sha256(
            "".join(self.digests[r] for r in sorted(self.digests)).encode()
        ).hexdigest()


class Nodes(Protocol):
    """What can be done to whole nodes (`crew.Several`)."""

    def lose(self, nodes: Sequence[int]) -> list[int]: ...

    def set_links(self, nodes: Sequence[int], up: bool) -> None: ...

    def shape_links(self, nodes: Sequence[int], shape: LinkShape | None) -> None: ...

    def set_etcd(self, up: bool) -> None: ...


class Witness:
    """One run's. `statuses`: the last word of each process, by (rank, process); one that stays in
    its process lives in several epochs. `events`: all journals', as they come; `places`: the
    nodes'."""

    def __init__(
        self,
        faults: Sequence[Fault],
        nproc: int,
        facts: DrillFacts,
        places: Sequence[CrewPlace],
        attempts: Path,
        nodes: Nodes | None = None,
        store: RoughStore | None = None,
    ) -> None:
        self._faults, self._nproc, self._facts = list(faults), nproc, facts
        self._store, self._is_rough = store, False
        self.places, self._attempts, self._nodes = places, attempts, nodes
        self._pages: dict[tuple[int, int], StatusPage] = {}  # (node, rank)
        self._horizon: tuple[int, HorizonPage] | None = None
        # rank: the lab's node it lives on, and its word
        self._now: dict[int, tuple[int, RankStatus]] = {}
        # the job's node: the lab's, where its ranks were last seen
        self._seat_of = {node: node for node in range(len(places))}
        self._searched_s = 0.0
        self._lost_epoch = -1  # what was protected in it no longer is
        self._notes, self._journals = (
            Lines(attempts),
            [JournalTail(place.journal) for place in places],
        )
        self._watches: dict[int, Iterator[None]] = {
            n: self._strike(n, f) for n, f in enumerate(faults) if f.from_outside
        }
        self.statuses: dict[tuple[int, int], RankStatus] = {}
        self.events: list[Event] = []

    def add(self, fault: Fault) -> int:
        """One fault more; its number."""
        number = len(self._faults)
        self._faults.append(fault)
        if fault.from_outside:
            self._watches[number] = self._strike(number, fault)
        return number

    def is_followed(self, number: int) -> bool:
        """Whether something of that fault is still to be done or seen."""
        return number in self._watches

    @property
    def completed_step(self) -> int:
        return max((status.completed_step for _, status in self._now.values()), default=-1)

    @property
    def living(self) -> list[RankStatus]:
        """The last word of every rank whose process lives."""
        return [status for _, status in self._now.values() if not is_dead(status.pid)]

    def committed(self, epoch: int) -> Stamp | None:
        """What lies on as many nodes as the policy asks for."""
        return None if self._horizon is None else self._horizon[1].read(epoch).committed

    def look(self) -> None:
        """Once every few milliseconds."""
        self._read_pages()
        self._hear()
        for number, watch in list(self._watches.items()):
            if next(watch, self) is self:
                del self._watches[number]

    def close(self) -> None:
        self._hear()
        self._forget(range(len(self.places)))

    # -- pages

    def _read_pages(self) -> None:
        if time.monotonic() - self._searched_s > SEARCH_S:
            self._search()
        found: dict[int, tuple[int, RankStatus]] = {}
        for (node, rank), page in self._pages.items():
            status = page.read()
            if status is not None and (
                rank not in found or status.updated_mono_ns > found[rank][1].updated_mono_ns
            ):
                found[rank] = (node, status)
        self._now = found
        self._seat_of.update((rank // self._nproc, node) for rank, (node, _) in found.items())
        for rank, (_, status) in found.items():
            self.statuses[rank, status.pid] = status
            at = (status.epoch, rank)
            self._facts.completed[at] = max(
                self._facts.completed.get(at, -1), status.completed_step
            )
        if self._horizon is not None and found:
            epoch = max(status.epoch for _, status in found.values())
            committed, known, now_ns = (
                self._horizon[1].read(epoch).committed,
                self._facts.committed,
                time.monotonic_ns(),
            )
            if committed is None:
                return
            if epoch > self._lost_epoch:
                self._facts.protected_ns.setdefault(epoch, now_ns)
            if not known or known[-1][:2] != (committed.epoch, committed.step):
                known.append((committed.epoch, committed.step, now_ns))

    def _search(self) -> None:
        self._searched_s = time.monotonic()
        for journal in self._journals:
            self.events += journal.read()
        for node, place in enumerate(self.places):
            for rank in ranks_in(MEMORY, place.job_dir):
                if (node, rank) not in self._pages:
                    with suppress(OSError, ValueError):
                        page = StatusPage(MEMORY, status_path(place.job_dir, rank))
                        self._pages[node, rank] = page
            if self._horizon is None:
                with suppress(OSError, ValueError):
                    self._horizon = (node, HorizonPage(MEMORY, place.job_dir, make=False))

    def _forget(self, nodes: Sequence[int]) -> None:
        """Their memory is another one's now."""
        for node, rank in [key for key in self._pages if key[0] in nodes]:
            self._pages.pop((node, rank)).close()
        if self._horizon is not None and self._horizon[0] in nodes:
            self._horizon[1].close()
            self._horizon = None

    def _on(self, node: int) -> list[RankStatus]:
        """The living ranks of the job's node."""
        return [
            status
            for rank, (_, status) in self._now.items()
            if rank // self._nproc == node and not is_dead(status.pid)
        ]

    def _job_dir(self, rank: int) -> Path:
        return self.places[self._now[rank][0]].job_dir

    # -- notes

    def _hear(self) -> None:
        """What was noted since the last look."""
        for said in self._notes.new():
            self._take(said)

    def _take(self, said: dict[str, Any]) -> None:
        number = int(said["fault"])
        fault = self._faults[number]
        if said["what"] == ASKS:
            if number not in self._watches and not any(
                n["fault"] == number for n in self._facts.notes
            ):
                self._watches[number] = self._strike_nodes(number, fault, said)
            return
        self._facts.notes.append(said)
        if said["what"] == "cannot":
            self._facts.cannot[number] = said["why"]
        elif said["what"] == "did" and not fault.from_outside and not fault.nodes:
            self._watches[number] = self._follow(number, fault, said)

    def _saw(self, number: int, what: str) -> None:
        self._facts.sightings.setdefault(number, []).append(what)

    def _told(self, number: int, key: str) -> Any:
        return next((n[key] for n in self._facts.notes if n["fault"] == number and key in n), None)

    # -- faults from outside

    def _strike(self, number: int, fault: Fault) -> Iterator[None]:
        """Wait for the moment, do it, and follow what becomes of it."""
        if fault.nodes:
            while (moment := self._protecting(fault)) is None:
                yield
            yield from self._strike_nodes(number, fault, moment)
            return
        while True:
            while (
                (found := self._now.get(fault.rank)) is None
                or is_dead(found[1].pid)
                or not self._is_moment(number, fault, found[1])
            ):
                yield
            status = found[1]
            at = time.monotonic() + (fault.after_ms or 0) / 1000
            while time.monotonic() < at:
                yield
            while fault.kind in STORE_KINDS and self._is_rough:
                yield
            if is_dead(status.pid):
                continue  # another fault was quicker: the next life's moment, then
            note(
                self._attempts,
                number,
                "about to",
                pid=status.pid,
                phase=status.phase.name.lower(),
                step=status.step,
            )
            if fault.kind == ETCD_RESTART:
                yield from self._restart_etcd(number, fault)
                return
            if fault.kind in STORE_KINDS:
                yield from self._roughen(number, fault)
                return
            try:
                said = self._do(fault, status.pid)
            except ProcessLookupError:
                yield  # the next life's moment, or a prober that has not been started yet
                continue
            except OSError as error:
                note(self._attempts, number, "cannot", why=f"{type(error).__name__}: {error}")
                return
            note(self._attempts, number, "did", **said)
            if fault.kind not in PART_FAULTS:
                yield from self._follow(number, fault, said)
            return

    def _do(self, fault: Fault, pid: int) -> dict[str, int]:
        if fault.kind == "keeper-kill":
            return {"keeper_pid": kill_keeper(self._job_dir(fault.rank))}
        if fault.kind == AGENT_KILL:
            return {"agent_pid": kill_agent(self._job_dir(fault.rank))}
        if fault.kind in PART_FAULTS:
            return part_faults.strike(fault, self.places[self._now[fault.rank][0]].journal)
        os.kill(pid, signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
        return {"pid": pid}

    def _is_moment(self, number: int, fault: Fault, status: RankStatus) -> bool:
        if fault.phase == "restore":
            before = (
                n["mono_ns"]
                for n in self._facts.notes
                if n["fault"] == number - 1 and n["what"] != "about to"
            )
            caused_ns = next(before, None)
            if caused_ns is None:
                return False
            # on a busy machine a restore may be over before anybody has looked
            return status.phase is Phase.RESTORE or any(
                e.kind == "restored" and e.who == f"rank {fault.rank}" and e.mono_ns > caused_ns
                for e in self.events
            )
        resting = (Phase.RESTORE, Phase.STARTING, Phase.DONE)
        is_reached = status.step >= fault.step and status.phase not in resting
        return is_reached and self._is_its_turn(number, fault)

    def _is_its_turn(self, number: int, fault: Fault) -> bool:
        """Faults that fall to one rank in one step come in their order: one may have to wait for
        what it needs, the next keeper, say."""
        before = {
            n
            for n, f in enumerate(self._faults[:number])
            if (f.rank, f.step, f.nodes) == (fault.rank, fault.step, fault.nodes)
        }
        return before <= {n["fault"] for n in self._facts.notes if n["what"] != "about to"}

    def _protecting(self, fault: Fault) -> dict[str, Any] | None:
        """The moment: a rank of the node has sealed that step or a later one, and it is not
        committed yet."""
        for status in self._on(fault.nodes[0]):
            sealed = max(
                (v.stamp for v in status.slots if v.state is SlotState.SEALED), default=None
            )
            if (
                sealed is None
                or sealed.step < fault.step
                or status.phase in (Phase.RESTORE, Phase.STARTING, Phase.DONE)
            ):
                continue
            committed = (
                self._horizon[1].read(status.epoch).committed if self._horizon is not None else None
            )
            if sealed.epoch == status.epoch and (committed is None or committed < sealed):
                return {"phase": PROTECT, "step": sealed.step, "mono_ns": time.monotonic_ns()}
        return None

    def _strike_nodes(self, number: int, fault: Fault, moment: dict[str, Any]) -> Iterator[None]:
        assert self._nodes is not None
        at_ns = moment["mono_ns"] + int((fault.after_ms or 0) * MS_NS)
        while time.monotonic_ns() < at_ns:
            yield
        # Agents get their node's number as they come: which of the lab's nodes it is, ranks tell.
        seats = sorted({self._seat_of[node] for node in fault.nodes})
        note(
            self._attempts,
            number,
            "about to",
            phase=moment["phase"],
            step=moment["step"],
            nodes=fault.nodes,
            seats=seats,
        )
        try:
            if fault.kind in LINK_KINDS:
                yield from self._flap(number, fault, seats)
            else:
                self._lose(number, fault, seats)
        except ConfigError as error:
            note(self._attempts, number, "cannot", why=str(error))

    def _lose(self, number: int, fault: Fault, seats: Sequence[int]) -> None:
        assert self._nodes is not None
        self._lost_epoch = max(
            (status.epoch for _, status in self._now.values()), default=self._lost_epoch
        )
        pids = self._nodes.lose(seats)
        note(self._attempts, number, "did", pids=pids)
        self._forget(seats)
        if pids and all(map(is_dead, pids)):
            self._saw(number, f"{len(pids)} processes of {_named(fault)} are gone")
        if not any(self.places[seat].job_dir.parents[1].exists() for seat in seats):
            self._saw(number, f"the memory of {_named(fault)} is gone")

    def _flap(self, number: int, fault: Fault, seats: Sequence[int]) -> Iterator[None]:
        assert self._nodes is not None and fault.for_ms is not None
        self._harm_links(fault, seats)
        note(self._attempts, number, "did")
        began_ns = time.monotonic_ns()
        while time.monotonic_ns() < began_ns + int(fault.for_ms * MS_NS):
            yield
        if fault.kind == "link-down":
            self._nodes.set_links(seats, up=True)
        else:
            self._nodes.shape_links(seats, None)
        took = human_ns(time.monotonic_ns() - began_ns)
        self._saw(number, f"the link of {_named(fault)} {LINK_WORDS[fault.kind]} {took}")

    def _harm_links(self, fault: Fault, seats: Sequence[int]) -> None:
        assert self._nodes is not None
        if fault.kind == "link-down":
            self._nodes.set_links(seats, up=False)
        else:
            self._nodes.shape_links(seats, LinkShape(HARMED_BITS_PER_S, fault.kind == "link-loss"))

    def _restart_etcd(self, number: int, fault: Fault) -> Iterator[None]:
        assert self._nodes is not None and fault.for_ms is not None
        self._nodes.set_etcd(up=False)
        note(self._attempts, number, "did")
        began_ns = time.monotonic_ns()
        while time.monotonic_ns() < began_ns + int(fault.for_ms * MS_NS):
            yield
        self._nodes.set_etcd(up=True)
        self._saw(number, f"etcd was away for {human_ns(time.monotonic_ns() - began_ns)}")

    def _roughen(self, number: int, fault: Fault) -> Iterator[None]:
        """Until its time is over, somebody has met with it and training has gone on: it does not
        wait for a store, unless a lost node has taken more than memory survives."""
        assert self._store is not None and fault.for_ms is not None
        self._is_rough = True
        known, began_step = len(self._store.met()), self.completed_step
        self._store.behave(BEHAVIOURS[fault.kind])
        note(self._attempts, number, "did")
        began_ns = time.monotonic_ns()
        until_ns = began_ns + int(fault.for_ms * MS_NS)
        last_ns = until_ns + int(ROUGH_S * S_NS)
        met, goes_on = 0, False
        while (now_ns := time.monotonic_ns()) < until_ns or (now_ns < last_ns and not goes_on):
            yield
            met = len(self._store.met()) - known + self._refused_since(began_ns)
            has_trained = self.completed_step > began_step + 1
            goes_on = met > 0 and (has_trained or self._ended_since(began_ns, "kill-node"))
        with self._store.still() as directory:
            self._facts.half += half_checkpoints(directory)
        self._store.heal()
        self._is_rough = False
        note(self._attempts, number, "ended")
        if met:
            lasted = human_ns(time.monotonic_ns() - began_ns)
            self._saw(number, f"in {lasted} {met} requests or acts met with it")
        if self.completed_step > began_step + 1:
            steps = f"{began_step} to {self.completed_step}"
            self._saw(number, f"training went on from step {steps} meanwhile")
        elif self._ended_since(began_ns):
            self._saw(number, "another fault ended ranks meanwhile")

    def _refused_since(self, began_ns: int) -> int:
        """How often somebody told that the store refused its connection."""
        return sum(
            os.strerror(errno.ECONNREFUSED) in e.why for e in self.events if e.mono_ns > began_ns
        )

    def _ended_since(self, began_ns: int, kind: str = "") -> bool:
        """Whether a fault, of that kind if one is said, has ended a rank."""
        since = [self._faults[n["fault"]] for n in self._facts.notes if n["mono_ns"] > began_ns]
        return any(f.ends_a_rank and kind in ("", f.kind) for f in since)

    # -- what becomes of a fault

    def _follow(self, number: int, fault: Fault, said: dict[str, Any]) -> Iterator[None]:
        if fault.kind == "keeper-kill":
            yield from self._until_gone(number, int(said["keeper_pid"]), "keeper process")
        elif fault.kind == AGENT_KILL:
            yield from self._until_gone(number, int(said["agent_pid"]), "agent process")
        elif fault.is_number or fault.is_slowness:
            return  # what becomes of it the journals tell
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
        note(self._attempts, number, "ended", pid=pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _look_for_torn(self, number: int, rank: int) -> None:
        for path in slot_paths(MEMORY, self._job_dir(rank), rank):
            with suppress(OSError, DamageError):
                slot = Slot(MEMORY, path)
                header = slot.header()
                slot.close()
                if header.state is SlotState.WRITING:
                    self._saw(
                        number,
                        f"{path.name} of rank {rank} was left with a payload of "
                        f"{header.stamp} and no seal",
                    )

    def _follow_full(self, number: int, fault: Fault, filler: Path) -> Iterator[None]:
        if os.statvfs(filler.parent).f_bavail == 0:
            self._saw(number, f"{filler.parent} has 0 bytes free")
        began_ns = int(self._told(number, "mono_ns"))
        answer = "persist-failed" if fault.where == "store" else "resumed"
        while not any(e.kind == answer and e.mono_ns > began_ns for e in self.events):
            yield
        filler.unlink(missing_ok=True)  # what follows may go well again


def _named(fault: Fault) -> str:
    return f"node {', '.join(map(str, fault.nodes))}"
