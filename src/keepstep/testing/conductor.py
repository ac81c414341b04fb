"""Conductor: runs the drill's job in real processes, and undisturbed for comparison.

Comes in: a `Drill` (the job's parameters and the faults). Goes out: `DrillFacts`, everything that
was
seen: exit code, digests, the journals, what was left behind, and what the witness saw of the
faults. Judges nothing (verdict.py). With a `Soak` the faults come as the job runs, and it trains
until the soak is over.

Invariant: whatever happens, when `conduct` returns no process of the job lives and nothing of it is
in its arena_dir.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from keepstep.config import Config, job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.model.units import MIB
from keepstep.testing import network
from keepstep.testing.allowance import allow
from keepstep.testing.crew import Alone, Crew, CrewPlace, Several, launch
from keepstep.testing.etcd import Members
from keepstep.testing.faults import STORE_KINDS, Fault, to_plan
from keepstep.testing.lab import Lab, owner_of
from keepstep.testing.lines import Lines
from keepstep.testing.rough_store import RoughStore, half_checkpoints
from keepstep.testing.soak import Soak
from keepstep.testing.witness import DrillFacts, Witness

LAUNCHERS = ("run", "torchrun", "plain")
REMOVAL_S = 20.0  # how long the keepers may take to remove everything after the job's end
RESTART_S = 30.0  # the longest a restart may take on a busy machine; with several nodes twice that
GRACE_S = 30.0
BUSY_STEP_MS = 40  # a fifth of what a step may take by itself where many share the processors
MOST_RESTARTS = 10_000  # of a soak
# of a lost node nobody says a word: a drill does not wait for ten seconds each time
LINK_DEAD_S = 3.0

Progress = Callable[[int, int], None]  # step reached, faults done


@dataclass(frozen=True)
class Drill:
    """A job's parameters and what is to happen to it. Everything is kept below `work`. `nproc`
    ranks on each of `nodes` nodes."""

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
    nodes: int = 1
    policy: str = "auto"
    rate_bits_per_s: int | None = None
    namespaces: bool | None = None
    etcd: bool = False  # several nodes meet over one
    persist_s: float = 3.0  # the longest a step waits for its checkpoint
    measures: bool = False  # when each phase of each rank begins
    # the job does so many steps, and `steps` is its schedule's length alone
    stop_step: int | None = None
    # what the job does about replicas that differ
    on_difference: str = "rollback"
    digest_every_steps: int = 1
    buddy_every_steps: int = 0  # 0: nobody's gradient is computed twice
    replay_update_bytes: int = 0  # 0: no update is made again

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc

    @property
    def key(self) -> str:
        """Equal for drills whose undisturbed runs end in the same state: where a rank lives does
        not matter."""
        parts = [
            self.world_size,
            self.steps,
            self.stop_step,
            self.seed,
            self.width,
            self.buddy_every_steps,
            version("torch"),
            Path(__file__).with_name("job.py").read_text(),
        ]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def conduct(
    drill: Drill, progress: Progress = lambda step, done: None, soak: Soak | None = None
) -> DrillFacts:
    """Run the job once, with its faults. Raises ConfigError when the nodes cannot be made."""
    facts = DrillFacts(f"drill-{os.urandom(4).hex()}", drill.nodes, drill.policy, drill.world_size)
    filled = {f.where: drill.work / f.where for f in drill.faults if f.kind == "full"}
    if soak is not None and soak.fills_store:
        filled["store"] = drill.work / "store"
    if "arena" in filled:
        drill = replace(drill, arena_dir=filled["arena"])
    if "store" in filled or (
        drill.store is None and (soak is not None or any(f.needs_store for f in drill.faults))
    ):
        drill = replace(drill, store=drill.work / "store")
    with ExitStack() as stack:
        for place, directory in filled.items():
            why = mount_small(directory)
            stack.callback(unmount, directory)
            facts.cannot.update(
                {
                    n: why
                    for n, f in enumerate(drill.faults)
                    if why and (f.kind, f.where) == ("full", place)
                }
            )
        if not facts.cannot:
            _DrillRun(drill, facts, soak).go(progress)
    return facts


def can_mount(directory: Path) -> bool:
    """Whether filesystems can be filled here."""
    why_not = mount_small(directory)
    if not why_not:
        unmount(directory)
    return not why_not


def mount_small(directory: Path) -> str:
    """A filesystem small enough to be filled; the reason when that is not allowed here."""
    directory.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={64 * MIB},mode=0700",
            "keepstep-drill",
            str(directory),
        ],
        capture_output=True,
        text=True,
    )
    return (
        ""
        if done.returncode == 0
        else f"a small filesystem cannot be mounted at {directory}: "
        f"{done.stderr.strip() or done.returncode}"
    )


def unmount(directory: Path) -> None:
    subprocess.run(["umount", "--lazy", str(directory)], capture_output=True)


class _DrillRun:
    """One run of the job."""

    def __init__(self, drill: Drill, facts: DrillFacts, soak: Soak | None) -> None:
        self.drill, self.facts, self.soak = drill, facts, soak
        self.room = drill.work / facts.job
        self.results, self.attempts = self.room / "results", self.room / "attempts.jsonl"
        self.later, self.until = self.room / "faults.jsonl", self.room / "until.json"
        self.phases = self.room / "phases.jsonl" if drill.measures else None
        self.results.mkdir(parents=True)
        self.store = None if drill.store is None else drill.store / facts.job
        self.rough: RoughStore | None = None
        self.deadly = (
            sum(f.ends_a_rank or f.kind == "link-down" for f in drill.faults)
            if soak is None
            else MOST_RESTARTS
        )
        if drill.stop_step is not None:
            allow(self.until, drill.stop_step, final=True)

    def go(self, progress: Progress) -> None:
        with ExitStack() as stack:
            log = stack.enter_context(open(self.room / "job.log", "ab"))
            if self.drill.nodes == 1:
                self._serve_store(stack)
                crew: Crew = self._alone(log)
                several = None
            else:
                lab = Lab(
                    self.drill.nodes, self.room, self.drill.rate_bits_per_s, self.drill.namespaces
                )
                stack.callback(self._look_for, lab)  # once it has ended
                stack.enter_context(lab)
                self._serve_store(stack, lab.network.host)
                crew = several = self._several(lab, log, self._start_etcd(stack, lab))
            witness = Witness(
                self.drill.faults,
                self.drill.nproc,
                self.facts,
                crew.places,
                self.attempts,
                several,
                self.rough,
            )
            self._write_plan(crew)
            if self.soak is not None:
                self.soak.begin(witness, self.facts, self.later, self.until)
            crew.start()
            try:
                self._follow(crew, witness, progress)
            finally:
                crew.end()
                witness.close()
        self._collect(crew, witness)

    def _follow(self, crew: Crew, witness: Witness, progress: Progress) -> None:
        deadline, reached = time.monotonic() + self._longest_s(), -1
        tick_s = (
            0.001
            if self.soak is not None or any(f.from_outside or f.nodes for f in self.drill.faults)
            else 0.01
        )
        while time.monotonic() < deadline:
            witness.look()
            progress(witness.completed_step, len({n["fault"] for n in self.facts.notes}))
            self.facts.exit_code = crew.poll()
            if self.facts.exit_code is not None:
                break
            if self.soak is not None and not self.soak.is_over:
                self.soak.look()
                deadline = time.monotonic() + self._longest_s()
                if self.soak.failure:
                    return
            elif self.soak is not None and witness.completed_step > reached:
                # how long its last steps take on a busy machine, nobody knows
                deadline, reached = time.monotonic() + self._longest_s(), witness.completed_step
            time.sleep(tick_s)
        if self.soak is not None:
            self._explain(self.soak)
        until = time.monotonic() + REMOVAL_S
        while crew.remains() and time.monotonic() < until:
            witness.look()
            time.sleep(0.02)
        self.facts.left_over = crew.remains()

    def _explain(self, soak: Soak) -> None:
        """Why it is over, if it should not be."""
        if not soak.is_over:
            soak.fail(
                "expected the job to train on, found it ended with exit code "
                f"{self.facts.exit_code}"
            )
        elif self.facts.exit_code is None:
            soak.fail(
                f"expected the job to end after step {soak.stop_step}, found no new step in "
                f"{self._longest_s():.0f} s"
            )

    def _longest_s(self) -> float:
        """The longest the job may take on a busy machine; in a soak, between two of the steps
        behind its end."""
        restart_s = RESTART_S * (2 if self.drill.nodes > 1 else 1)
        if self.soak is not None:
            return 2 * restart_s
        steps = self.drill.steps if self.drill.stop_step is None else self.drill.stop_step
        step_s = max(self.drill.step_ms, BUSY_STEP_MS) / 1000
        slowed = max((fault.slows_by for fault in self.drill.faults), default=1.0)
        harmed_s = sum(fault.for_ms or 0 for fault in self.drill.faults) / 1000
        return 2 * restart_s + 5 * steps * step_s * slowed + harmed_s + restart_s * self.deadly

    # -- starting

    def _write_plan(self, crew: Crew) -> None:
        plan = {
            "faults": to_plan(self.drill.faults),
            "later": None if self.soak is None else str(self.later),
            "phases": None if self.phases is None else str(self.phases),
            "seed": self.drill.seed,
            "job": self.facts.job,
            "attempts": str(self.attempts),
            "journals": [str(place.journal) for place in crew.places],
            "store": None if self.store is None else str(self.store),
        }
        (self.room / "plan.json").write_text(json.dumps(plan))

    def _alone(self, log: BinaryIO) -> Alone:
        drill, place = (
            self.drill,
            CrewPlace(
                job_dir_of(self.drill.arena_dir, self.facts.job), self.room / "journal.jsonl"
            ),
        )
        options = ["--standalone"] if drill.launcher == "torchrun" else []
        restarts = self.deadly + 3 if drill.launcher == "plain" else 0
        return Alone(self.facts.job, place, self._command(options), self._environ(), log, restarts)

    def _several(self, lab: Lab, log: BinaryIO, etcd: Members | None) -> Several:
        meeting = (
            ["--rdzv-endpoint", lab.endpoint()]
            if etcd is None
            else ["--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoint]
        )
        command = self._command(["--nnodes", str(self.drill.nodes), *meeting])
        return Several(self.facts.job, lab, command, self._environ(), log, etcd)

    def _serve_store(self, stack: ExitStack, host: str = "127.0.0.1") -> None:
        """Where a fault is the store's, the job reaches it over a server that can be told so."""
        kinds = {fault.kind for fault in self.drill.faults}
        roughens = bool(self.soak and self.soak.roughens_store) or not kinds.isdisjoint(STORE_KINDS)
        if self.store is not None and roughens:
            self.rough = stack.enter_context(RoughStore(self.store, host, self.drill.seed))

    def _start_etcd(self, stack: ExitStack, lab: Lab) -> Members | None:
        """Outside of all nodes, as the other meeting point is."""
        if not self.drill.etcd:
            return None
        room = self.room / "etcd"
        room.mkdir()
        members = Members(room, host=lab.network.host)
        stack.callback(members.stop)
        return members

    def _command(self, options: list[str]) -> list[str]:
        drill = self.drill
        words = [
            *("--steps", drill.steps),
            *("--width", drill.width),
            *("--seed", drill.seed),
            *("--step-ms", drill.step_ms),
        ]
        words += ["--results", self.results, "--plan", self.room / "plan.json"]
        if self.store is not None:
            # no step waits for a store that is rough on purpose
            persist_s = drill.persist_s if self.rough is None else 0.0
            words += ["--persist-every", drill.persist_every, "--persist-s", persist_s]
        if drill.buddy_every_steps:
            words += ["--buddy-every", drill.buddy_every_steps]
        if self.soak is not None or drill.stop_step is not None:
            words += ["--until", self.until]
        options += ["--nproc-per-node", str(drill.nproc), "--max-restarts", str(self.deadly + 3)]
        return launch(drill.launcher, ["keepstep.testing.job", *map(str, words)], options)

    def _environ(self) -> dict[str, str]:
        """On several nodes each has its own arena_dir and state_dir in place of these."""
        url = None if self.store is None else str(self.store)
        config = Config(
            job=self.facts.job,
            store=url if self.rough is None else self.rough.url,
            persist_every_steps=0,
            arena_dir=str(self.drill.arena_dir),
            state_dir=str(self.drill.work),
            grace_s=GRACE_S,
            redundancy=self.drill.policy,
            link_dead_s=LINK_DEAD_S,
            on_difference=self.drill.on_difference,
            wrong_numbers="skip",
            digest_every_steps=self.drill.digest_every_steps,
            replay_update_bytes=self.drill.replay_update_bytes,
        )
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
        # torchrun keeps one store over its restarts, where ranks find addresses of the dead
        # (github.com/pytorch/pytorch/issues/135712).
        return {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **config.to_env(),
            **({} if self.rough is None else self.rough.environ(self.room)),
        }

    # -- ending

    def _look_for(self, lab: Lab) -> None:
        if owner_of(lab.number) is None:  # else another lab has its number by now
            self.facts.left_over += network.remains().get(lab.number, [])
            self.facts.left_over += [str(lab.directory)] if lab.directory.exists() else []

    def _collect(self, crew: Crew, witness: Witness) -> None:
        facts = self.facts
        facts.events = sorted(
            (e for place in crew.places for e in read_journal(place.journal)),
            key=lambda event: event.mono_ns,
        )
        for rank in range(self.drill.world_size):
            with suppress(FileNotFoundError):
                facts.digests[rank] = json.loads((self.results / f"rank-{rank}.json").read_text())[
                    "digest"
                ]
        if len(facts.digests) < self.drill.world_size:
            facts.digests = {}
        for status in witness.statuses.values():
            for name in facts.counts:
                facts.counts[name] += getattr(status, name)
        if self.rough is not None:
            facts.half += half_checkpoints(self.rough.directory)
        facts.log = (self.room / "job.log").read_text(errors="replace")
        facts.phases = [] if self.phases is None else Lines(self.phases).new()


def reference(drill: Drill, progress: Progress = lambda step, done: None) -> str | None:
    """The hash of the undisturbed run, on one node; remembered in `work`, so that drills of one job
    pay for it once."""
    memo = drill.work / f"reference-{drill.key}.json"
    with suppress(FileNotFoundError):
        return str(json.loads(memo.read_text())["hash"])
    alone = replace(
        drill,
        faults=(),
        store=None,
        etcd=False,
        step_ms=0.0,
        measures=False,
        launcher="run" if drill.nodes > 1 else drill.launcher,
    )
    facts = conduct(replace(alone, nodes=1, nproc=drill.world_size, policy="none"), progress)
    if facts.exit_code != 0 or facts.hash is None:
        return None
    memo.write_text(json.dumps({"hash": facts.hash}))
    return facts.hash
