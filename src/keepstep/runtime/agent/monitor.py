"""Monitor: what an agent sees of its ranks while they run, and what it makes of an exit.

    status pages, processes -> core/detection/progress.py -> core/detection/diagnosis.py
    -> diagnoses, with the stacks of all ranks saved before they are told

A tick costs a tenth of a millisecond a rank and never waits: a closer look at suspects (their
children, their stacks, what other nodes see) is taken by the executor. If that hangs, only evidence
is missing. Kills nobody.

Invariant: a deadly diagnosis is reported once for each life of a rank, and only after the stacks
were saved and torch's dumps read, where there are any, or the time for that was over. A rank that
survives its kill is reported once more, as `unkillable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from keepstep.core.detection.deadlines import Deadlines
from keepstep.core.detection.diagnosis import ExitFacts, diagnose, explain_exit
from keepstep.core.detection.missed_call import missed_call
from keepstep.core.detection.progress import Progress
from keepstep.edge.shm.status_page import StatusPages
from keepstep.model.diagnosis import (
    Diagnosis,
    Evidence,
    GroupSample,
    Stack,
    Strength,
    evidence_from_text,
    evidence_to_text,
)
from keepstep.model.events import ERROR, WARNING
from keepstep.model.snapshot import RankStatus
from keepstep.model.units import S_NS, counted, human_ns
from keepstep.ports import Executor, Journal, Memory, Probes
from keepstep.runtime.agent.evidence_board import EvidenceBoard

STACKS_FRESH_NS = 10 * S_NS
KILLED = (-9, 137)  # 137: as a shell in between tells it
LONG_AGO_NS = -(1 << 62)


@dataclass(frozen=True, slots=True)
class _CloserLook:
    """What the executor has found, by rank."""

    groups: dict[int, GroupSample]
    wchans: dict[int, str]
    stacks: dict[int, Stack]


@dataclass
class _Watched:
    """One life of a rank."""

    pid: int
    oom_kills: Callable[[], int | None]
    oom_kills_before: int | None
    machine_oom_kills_before: int | None
    diagnosis: Diagnosis | None = None  # the one that has been told
    told_ns: int = 0
    has_outlived: bool = False  # its diagnosis, and that has been told too


@dataclass
class _Suspicion:
    """From when somebody seems not to go on until all do again."""

    told: set[tuple[str, int | None]] = field(default_factory=set)  # what the journal knows
    is_looking: bool = False
    has_looked: bool = False
    looked_ns: int = LONG_AGO_NS
    others: list[Evidence] = field(default_factory=list)  # what other nodes see
    saving_since_ns: int | None = None  # stacks, for a diagnosis that is about to be told
    are_stacks_saved: bool = False
    missed: str | None = None  # by torch's flight recorder; None: nobody has looked yet


class Monitor:
    """Of one node's ranks."""

    def __init__(
        self,
        memory: Memory,
        probes: Probes,
        executor: Executor,
        journal: Journal,
        job_dir: Path,
        deadlines: Deadlines,
        node: int = 0,
    ) -> None:
        self._probes = probes
        self._executor = executor
        self._journal = journal
        self._deadlines = deadlines
        self._node = node
        self._pages = StatusPages(memory, job_dir)
        self._progress = Progress(deadlines, node)
        self._board: EvidenceBoard | None = None
        self._watched: dict[int, _Watched] = {}
        self._last: dict[int, RankStatus] = {}
        self._suspicion: _Suspicion | None = None
        self._ticked_ns = LONG_AGO_NS
        self._stacks_ns = LONG_AGO_NS
        self._has_posted = False
        self._has_told_job = False
        self._has_told_removed = self._is_removed = False
        self._job_dir = job_dir
        self.stacks = ""  # where they were saved last

    def begin(self, pids: Mapping[int, int], now_ns: int, board: EvidenceBoard | None) -> None:
        """These ranks (by their number in the job: process) have just been started, or stayed when
        others were; what was known of their lives before is over, but not how fast they usually
        are. `board`: the other nodes'."""
        self._board = board
        for rank in [r for r, life in self._watched.items() if not self._is_there(life.pid)]:
            self.forget(rank)
        for rank, pid in pids.items():
            counter = self._probes.oom_counter(pid)
            machine = self._probes.machine_oom_kills()
            self._watched[rank] = _Watched(pid, counter, counter(), machine)
            self._last.pop(rank, None)
            self._progress.begin(rank, now_ns)
        self._suspicion = None  # what it still brings is about the lives before
        self._has_told_job = self._has_told_removed = self._is_removed = False

    def _is_there(self, pid: int) -> bool:
        return self._probes.process(pid).state != "gone"

    def forget(self, rank: int) -> None:
        """It has ended, and `explain_exit` has been asked."""
        self._progress.forget(rank)
        self._watched.pop(rank, None)

    def close(self) -> None:
        self._pages.close()

    # -- looking

    def tick(self, now_ns: int) -> list[Diagnosis]:
        """To be called about every `tick_ns`; earlier calls do nothing. Deadly diagnoses, each
        once: about own ranks, or about nobody in particular. What is only suspected, or another
        node's to act on, is in the journal."""
        if now_ns - self._ticked_ns < self._deadlines.tick_ns:
            return []
        self._ticked_ns = now_ns
        self._progress.tick(now_ns)
        for rank, life in self._watched.items():
            status = self._status_of(rank, life)
            pid = life.pid if status is None else status.pid
            self._progress.observe(rank, status, self._probes.process(pid), now_ns)
        self._tell_removed()
        undead = [
            told
            for rank, life in self._watched.items()
            if (told := self._outlived(rank, life, now_ns)) is not None
        ]
        if undead or not self._progress.is_suspicious(now_ns):
            self._calm_down()
            return undead
        return self._suspect(now_ns)

    def _tell_removed(self) -> None:
        """Once a life of the ranks: they train on with what they have mapped."""
        if self._is_removed and not self._has_told_removed:
            self._has_told_removed = True
            why = (
                f"somebody has removed {self._job_dir} while the job trains: should a rank fail "
                "now, its steps cannot be restored from this node's memory (systemd removes it at "
                "logout where RemoveIPC=yes; `loginctl enable-linger` prevents that)"
            )
            self._journal.record("memory-removed", why, ERROR)

    def _suspect(self, now_ns: int) -> list[Diagnosis]:
        if self._suspicion is None:
            self._suspicion = _Suspicion()
        suspicion = self._suspicion
        evidence = [*self._progress.evidence(now_ns), *suspicion.others]
        diagnoses = diagnose(evidence, self._world_size(len(evidence)), self._deadlines)
        if suspicion.has_looked:
            self._tell_suspected(suspicion, diagnoses)
        self._look_closer(suspicion, now_ns)
        return self._tell(suspicion, [d for d in diagnoses if d.is_deadly], now_ns)

    def _calm_down(self) -> None:
        suspicion, self._suspicion = self._suspicion, None
        if suspicion is not None and suspicion.told:
            why = "all ranks of this node make progress again: the suspicion is over"
            self._journal.record("suspicion-over", why)
        if self._has_posted and self._board is not None:
            self._has_posted = False
            self._board.exchange(self._node, "", _nothing)

    def _status_of(self, rank: int, life: _Watched) -> RankStatus | None:
        """The rank's page, unless it was written by a life before this one. A wrapper's child is
        the rank when it is in its group."""
        status, is_removed = self._pages.read_mapped(rank)
        self._is_removed |= is_removed
        if status is None:
            return None
        if status.pid != life.pid and self._probes.group_of(status.pid) != life.pid:
            return None
        self._last[rank] = status
        return status

    def _world_size(self, seen: int) -> int:
        return max((status.world_size for status in self._last.values()), default=seen)

    @property
    def completed_step(self) -> int | None:
        """The newest step that all these ranks have completed in this life; None while one has told
        of none."""
        found = [self._status_of(rank, life) for rank, life in self._watched.items()]
        steps = [status.completed_step for status in found if status is not None]
        return min(steps, default=None) if len(steps) == len(found) else None

    def step_of(self, rank: int) -> int | None:
        """The step it was in when it was last seen; None when it has told of none."""
        status = self._status_of(rank, self._watched[rank]) or self._last.get(rank)
        return None if status is None or status.step < 0 else status.step

    # -- a closer look

    def _look_closer(self, suspicion: _Suspicion, now_ns: int) -> None:
        if suspicion.is_looking or now_ns - suspicion.looked_ns < self._deadlines.look_ns:
            return
        suspicion.is_looking = True
        suspicion.looked_ns = now_ns
        wants_stacks = now_ns - self._stacks_ns >= STACKS_FRESH_NS
        if wants_stacks:
            self._stacks_ns = now_ns
        pids = self._pids()

        def looked(found: _CloserLook) -> None:
            if self._suspicion is suspicion:
                for rank in self._watched:
                    self._progress.note(
                        rank,
                        found.groups.get(rank),
                        found.wchans.get(rank, ""),
                        found.stacks.get(rank),
                        self._ticked_ns,
                    )
                suspicion.is_looking = False
                suspicion.has_looked = True

        self._executor.submit(lambda: self._closer_look(pids, wants_stacks), looked)
        self._exchange(suspicion, now_ns)

    def _closer_look(self, pids: Mapping[int, int], wants_stacks: bool) -> _CloserLook:
        """On the executor."""
        probes = self._probes
        groups = {
            rank: probes.group(group)
            for rank, pid in pids.items()
            if (group := probes.group_of(pid)) is not None
        }
        wchans = {rank: probes.process(pid).wchan for rank, pid in pids.items()}
        stacks = probes.stacks(pids, self._deadlines.stacks_ns) if wants_stacks else {}
        return _CloserLook(groups, wchans, stacks)

    def _exchange(self, suspicion: _Suspicion, now_ns: int) -> None:
        """With the other nodes. Where none can be asked, or while none answers, of single ranks
        only those are named whose processes say it themselves."""
        if self._board is None:
            return

        def exchanged(shown: dict[int, str]) -> None:
            if self._suspicion is suspicion:
                suspicion.others = [
                    entry
                    for node, text in sorted(shown.items())
                    if node != self._node
                    for entry in _readable(text)
                ]

        self._has_posted = True
        text = evidence_to_text(self._progress.evidence(now_ns))
        self._board.exchange(self._node, text, exchanged)

    def _pids(self) -> dict[int, int]:
        return {
            rank: self._last[rank].pid if rank in self._last else life.pid
            for rank, life in self._watched.items()
        }

    # -- telling

    def _tell_suspected(self, suspicion: _Suspicion, diagnoses: Sequence[Diagnosis]) -> None:
        """Into the journal, once for each thing that is suspected."""
        for diagnosis in diagnoses:
            about = (diagnosis.kind, diagnosis.culprit)
            is_acted_upon = diagnosis.is_deadly and diagnosis.culprit in self._watched
            if about in suspicion.told or is_acted_upon:
                continue
            suspicion.told.add(about)
            elsewhere = diagnosis.node not in (None, self._node)
            where = f" on node {diagnosis.node}" if elsewhere else ""
            self._journal.record(
                "suspicion",
                f"{diagnosis.why}{where}",
                WARNING,
                rank=diagnosis.culprit,
                state=diagnosis.state,
                diagnosis=diagnosis.kind,
                stalled_ns=diagnosis.stalled_ns,
            )

    def _tell(
        self, suspicion: _Suspicion, deadly: Sequence[Diagnosis], now_ns: int
    ) -> list[Diagnosis]:
        """They wait for the stacks, wherever the culprit is."""
        if deadly and suspicion.saving_since_ns is None:
            suspicion.saving_since_ns = now_ns
            self._save_stacks(suspicion)
            self._read_recorder(suspicion, max(diagnosis.stalled_ns for diagnosis in deadly))
        since_ns = suspicion.saving_since_ns
        if since_ns is None:
            return []
        is_late = now_ns - since_ns >= self._deadlines.stacks_ns
        has_looked = suspicion.are_stacks_saved and suspicion.missed is not None
        if not has_looked and not is_late:
            return []
        if missed := suspicion.missed:
            deadly = [replace(one, why=f"{one.why}; {missed}") for one in deadly]
        return [diagnosis for diagnosis in deadly if self._is_news(diagnosis, now_ns)]

    def _is_news(self, diagnosis: Diagnosis, now_ns: int) -> bool:
        """Whether it is to be acted upon here, and has not been told in this life."""
        if diagnosis.culprit is None:
            is_news, self._has_told_job = not self._has_told_job, True
            return is_news
        life = self._watched.get(diagnosis.culprit)
        if life is None or life.diagnosis is not None:
            return False
        life.diagnosis = diagnosis
        life.told_ns = now_ns
        return True

    def _outlived(self, rank: int, life: _Watched, now_ns: int) -> Diagnosis | None:
        """It was to be killed, and it is still there: the kernel holds it."""
        before = life.diagnosis
        if before is None or life.has_outlived:
            return None
        if now_ns - life.told_ns < self._deadlines.kill_ns:
            return None
        sample = self._probes.process(life.pid)
        if sample.state == "gone":
            return None
        life.has_outlived = True
        where = f"{sample.state} in {sample.wchan}" if sample.wchan else sample.state
        since = human_ns(now_ns - life.told_ns)
        return Diagnosis(
            kind="unkillable",
            scope="rank",
            culprit=rank,
            node=self._node,
            state=sample.state,
            strength=Strength.FACT,
            why=f"rank {rank} is still alive {since} after this diagnosis, {where}: {before.why}",
            stalled_ns=before.stalled_ns,
        )

    def _save_stacks(self, suspicion: _Suspicion) -> None:
        pids = self._pids()

        def saved(found: str | OSError) -> None:
            suspicion.are_stacks_saved = True
            if isinstance(found, OSError):
                why = f"the stacks could not be saved ({found})"
                self._journal.record("stacks", why, WARNING)
            else:
                self.stacks = found
                why = f"the stacks of {counted(len(pids), 'rank')} are in {found}"
                self._journal.record("stacks", why, directory=found)

        def save() -> str | OSError:
            """On the executor."""
            stacks = self._probes.stacks(pids, self._deadlines.stacks_ns)
            try:
                return self._probes.save_stacks(stacks)
            except OSError as error:
                return error

        self._executor.submit(save, saved)

    def _read_recorder(self, suspicion: _Suspicion, stalled_ns: int) -> None:
        """What torch has dumped since nothing goes on, where the program has it do that."""
        pids = self._pids()

        def read(found: str) -> None:
            suspicion.missed = found

        def look() -> str:
            """On the executor."""
            return missed_call(self._probes.recorder_dumps(pids, stalled_ns), pids.keys())

        self._executor.submit(look, read)

    # -- exits

    def explain_exit(self, rank: int, code: int, message: str) -> Diagnosis:
        """Why it has ended; the diagnosis that had it killed, when one did. To be asked before
        `forget`."""
        life = self._watched[rank]
        status = self._status_of(rank, life) or self._last.get(rank)
        if life.diagnosis is not None and code in KILLED:
            return life.diagnosis
        peers = [other.pid for r, other in self._watched.items() if r != rank]
        machine = self._probes.machine_oom_kills()
        return explain_exit(
            ExitFacts(
                rank=rank,
                node=self._node,
                code=code,
                message=message,
                step=status.step if status else None,
                phase=status.phase if status else None,
                oom_kills=_grown(life.oom_kills_before, life.oom_kills()),
                machine_oom_kills=_grown(life.machine_oom_kills_before, machine),
                peers_running=sum(map(self._is_there, peers)),
            )
        )


def _grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _readable(text: str) -> list[Evidence]:
    """What another node shows; nothing when that is none of this release's words."""
    try:
        return evidence_from_text(text)
    except ValueError:
        return []


def _nothing(shown: dict[int, str]) -> None:
    """Nobody asked what the others show."""
