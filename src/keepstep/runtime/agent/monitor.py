"""Watch: what an agent sees of its ranks while they run, and what it makes of an exit.

    status pages, /proc -> core/detection/progress.py -> core/detection/diagnosis.py
        -> verdicts, with the stacks of all ranks saved before they are told

`tick` costs a tenth of a millisecond a rank and never waits: a closer look at suspects (their
children, their stacks, what other nodes see) is taken on a thread of its own, which may hang, and
then only evidence is missing. Kills nobody.

Invariant: a deadly verdict is told once a life, and only after the stacks were saved or their time
was over; who outlives it by the time a kill takes is told once more, as `unkillable`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from keepstep.config import Settings
from keepstep.core.detection.deadlines import Deadlines
from keepstep.core.detection.diagnosis import ExitFacts, diagnose, explain_exit
from keepstep.core.detection.progress import Progress
from keepstep.edge.os.journal import Journal
from keepstep.edge.probes import memory, process, stacks
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from keepstep.model.snapshot import RankStatus
from keepstep.model.units import S_NS, human_ns
from keepstep.model.verdict import (
    Evidence,
    GroupSample,
    Stack,
    Strength,
    Verdict,
    evidence_from_text,
    evidence_to_text,
)

STACKS_FRESH_NS = 10 * S_NS
KILLED = (-9, 137)  # 137: as a shell in between tells it

T = TypeVar("T")


class Board(Protocol):
    """Where the nodes of a job show each other what they see. May wait and may raise OSError: it is
    never asked on the agent's thread."""

    def post(self, node: int, evidence: str) -> None: ...

    def read(self) -> dict[int, str]: ...


@dataclass(frozen=True, slots=True)
class _Look:
    """What the thread has found."""

    groups: dict[int, GroupSample]
    wchans: dict[int, str]
    stacks: dict[int, Stack]
    others: list[Evidence]


@dataclass
class _Life:
    pid: int
    oom_file: Path | None
    oom_kills: int | None
    machine_oom_kills: int | None
    verdict: Verdict | None = None  # the one that has been told
    told_ns: int = 0
    outlived: bool = False  # its verdict, and that has been told too


class Watch:
    """Of one node's ranks; called on one thread."""

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        deadlines: Deadlines,
        node: int = 0,
        board: Board | None = None,
    ) -> None:
        self._settings, self._journal, self._deadlines, self._node, self._board = (
            settings,
            journal,
            deadlines,
            node,
            board,
        )
        self._progress = Progress(deadlines, node)
        self._lives: dict[int, _Life] = {}
        self._last: dict[int, RankStatus] = {}
        self._ticked_ns = self._looked_ns = self._stacks_ns = -(1 << 62)
        self._looking: Future[_Look] | None = None
        self._saving: Future[None] | None = None  # of the stall there is
        self._saving_since_ns = 0
        self._others: list[Evidence] = []
        self._suspected: set[tuple[str, int | None]] = set()  # what the journal has been told
        self._has_looked = self._told_job = self._posted = self._alone = False
        self.stacks = ""  # where they were saved last

    def begin(self, ranks: Mapping[int, int], now_ns: int, board: Board | None = None) -> None:
        """These ranks (by their number in the job: pid) have just been started, or stayed when
        others were; what was known of their lives before is over, but not their rhythm. Others that
        live are kept. `board`: the other nodes', from now on."""
        self._board = board or self._board
        for rank in [
            r for r, life in self._lives.items() if process.read_process(life.pid).state == "gone"
        ]:
            self.forget(rank)
        for rank, pid in ranks.items():
            counter = memory.find_counter(pid)
            self._lives[rank] = _Life(
                pid, counter, memory.read_counter(counter), memory.machine_oom_kills()
            )
            self._last.pop(rank, None)
            self._progress.begin(rank, now_ns)
        self._looking = self._saving = None  # what they will bring is about the lives before
        self._others, self._suspected, self._told_job = [], set(), False

    def forget(self, rank: int) -> None:
        """It has exited, and `explain_exit` has been asked."""
        self._progress.forget(rank)
        self._lives.pop(rank, None)

    def tick(self, now_ns: int) -> list[Verdict]:
        """To be called about every half second; earlier calls do nothing. Deadly verdicts, each
        once: about own ranks, or about nobody in particular. What is only suspected, or another
        node's to act on, is in the journal."""
        if now_ns - self._ticked_ns < self._deadlines.tick_ns:
            return []
        self._ticked_ns = now_ns
        self._progress.tick(now_ns)
        for rank, life in self._lives.items():
            status = self._status_of(rank, life)
            pid = life.pid if status is None else status.pid
            self._progress.observe(rank, status, process.read_process(pid), now_ns)
        self._take_look(now_ns)
        undead = [
            verdict
            for rank, life in self._lives.items()
            if (verdict := self._outlived(rank, life, now_ns))
        ]
        if undead or not self._progress.is_suspicious(now_ns):
            self._calm()
            return undead
        evidence = [*self._progress.evidence(now_ns), *self._others]
        verdicts = diagnose(evidence, self._world_size(len(evidence)), self._deadlines)
        if self._has_looked:
            self._suspect(verdicts)
        self._look_closer(now_ns)
        return self._tell([v for v in verdicts if v.is_deadly], now_ns)

    def explain_exit(self, rank: int, code: int, message: str) -> Verdict:
        """Why it has ended; the verdict that had it killed, when one did. To be asked before
        `forget`."""
        life = self._lives[rank]
        status = self._status_of(rank, life) or self._last.get(rank)
        if life.verdict is not None and code in KILLED:
            return life.verdict
        peers = [other.pid for r, other in self._lives.items() if r != rank]
        facts = ExitFacts(
            rank=rank,
            node=self._node,
            code=code,
            message=message,
            step=status.step if status else None,
            phase=status.phase if status else None,
            oom_kills=_grown(life.oom_kills, memory.read_counter(life.oom_file)),
            machine_oom_kills=_grown(life.machine_oom_kills, memory.machine_oom_kills()),
            peers_running=sum(process.read_process(pid).state != "gone" for pid in peers),
        )
        return explain_exit(facts)

    @property
    def completed_step(self) -> int | None:
        """The newest step that all these ranks have completed in this life; None while one has told
        of none."""
        found = [self._status_of(rank, life) for rank, life in self._lives.items()]
        return (
            None
            if None in found
            else min((status.completed_step for status in found if status), default=None)
        )

    def step_of(self, rank: int) -> int | None:
        """The step it was in when it was last seen; None when it has told of none."""
        status = self._status_of(rank, self._lives[rank]) or self._last.get(rank)
        return None if status is None or status.step < 0 else status.step

    # -- what is seen

    def _status_of(self, rank: int, life: _Life) -> RankStatus | None:
        """The rank's page, unless it was written by a life before this one. A wrapper's child is
        the rank when it is in its group."""
        status = read_status(MEMORY, self._settings.job_dir, rank)
        if status is None or (status.pid != life.pid and process.group_of(status.pid) != life.pid):
            return None
        self._last[rank] = status
        return status

    def _world_size(self, seen: int) -> int:
        return max((status.world_size for status in self._last.values()), default=seen)

    def _take_look(self, now_ns: int) -> None:
        if self._looking is None or not self._looking.done():
            return
        look, self._looking, self._has_looked = self._looking, None, True
        if (error := look.exception()) is not None:
            # it has found nothing; that is no evidence of anything
            self._journal.record(
                "watch-blind", f"a look at the ranks failed ({error!r})", logging.WARNING
            )
            return
        found = look.result()
        self._others = found.others
        for rank in self._lives:
            self._progress.note(
                rank,
                found.groups.get(rank),
                found.wchans.get(rank, ""),
                found.stacks.get(rank),
                now_ns,
            )

    def _look_closer(self, now_ns: int) -> None:
        if self._looking is not None or now_ns - self._looked_ns < self._deadlines.look_ns:
            return
        self._looked_ns = now_ns
        wants_stacks = now_ns - self._stacks_ns >= STACKS_FRESH_NS
        self._stacks_ns = now_ns if wants_stacks else self._stacks_ns
        text = evidence_to_text(self._progress.evidence(now_ns))
        self._looking = _on_a_thread(self._look, self._pids(), wants_stacks, text)
        self._posted = True

    def _look(self, pids: dict[int, int], wants_stacks: bool, text: str) -> _Look:
        """On the thread."""
        groups = {
            rank: process.read_group(group)
            for rank, pid in pids.items()
            if (group := process.group_of(pid)) is not None
        }
        wchans = {rank: process.read_process(pid).wchan for rank, pid in pids.items()}
        found = stacks.take(pids, self._deadlines.stacks_ns / S_NS) if wants_stacks else {}
        return _Look(groups, wchans, found, self._exchange(text))

    def _exchange(self, text: str) -> list[Evidence]:
        if self._board is None:
            return []
        try:
            self._board.post(self._node, text)
            posts = self._board.read()
            self._alone = False
            return [
                entry
                for node, post in sorted(posts.items())
                if node != self._node
                for entry in evidence_from_text(post)
            ]
        except (OSError, ValueError) as error:
            if not self._alone:
                self._alone = True
                why = (
                    f"what other nodes see cannot be had ({error}): of single ranks only stopped "
                    "ones are named"
                )
                self._journal.record("watch-alone", why, logging.WARNING)
            return []

    def _pids(self) -> dict[int, int]:
        return {
            rank: self._last[rank].pid if rank in self._last else life.pid
            for rank, life in self._lives.items()
        }

    # -- what is told

    def _suspect(self, verdicts: list[Verdict]) -> None:
        """Into the journal, once for each thing that is suspected."""
        for verdict in verdicts:
            about = (verdict.kind, verdict.culprit)
            if about not in self._suspected and (
                not verdict.is_deadly or verdict.culprit not in self._lives
            ):
                self._suspected.add(about)
                where = f" on node {verdict.node}" if verdict.node not in (None, self._node) else ""
                about_it = {
                    "rank": verdict.culprit,
                    "state": verdict.state,
                    "verdict": verdict.kind,
                    "stalled_ns": verdict.stalled_ns,
                }
                self._journal.record(
                    "suspicion", f"{verdict.why}{where}", logging.WARNING, **about_it
                )

    def _calm(self) -> None:
        if self._suspected:
            self._journal.record(
                "suspicion-over",
                "all ranks of this node go on: what was suspected has not come true",
            )
            self._suspected = set()
        self._saving, self._has_looked = None, False
        if self._posted and self._looking is None:
            self._posted, self._others = False, []
            _on_a_thread(self._exchange, "")

    def _tell(self, deadly: list[Verdict], now_ns: int) -> list[Verdict]:
        """They wait for the stacks, wherever the culprit is."""
        if deadly and self._saving is None:
            self._saving, self._saving_since_ns = _on_a_thread(self._save, self._pids()), now_ns
        if self._saving is None or (
            not self._saving.done() and now_ns - self._saving_since_ns < self._deadlines.stacks_ns
        ):
            return []
        told = []
        for verdict in deadly:
            life = None if verdict.culprit is None else self._lives.get(verdict.culprit)
            if life is not None and life.verdict is None:
                life.verdict, life.told_ns = verdict, now_ns
                told.append(verdict)
            elif verdict.culprit is None and not self._told_job:
                self._told_job = True
                told.append(verdict)
        return told

    def _outlived(self, rank: int, life: _Life, now_ns: int) -> Verdict | None:
        """It was to be killed, and it is still there: the kernel holds it."""
        if life.verdict is None or life.outlived or now_ns - life.told_ns < self._deadlines.kill_ns:
            return None
        found = process.read_process(life.pid)
        if found.state == "gone":
            return None
        life.outlived = True
        where = f"{found.state}{f' in {found.wchan}' if found.wchan else ''}"
        why = (
            f"rank {rank} is still there {human_ns(now_ns - life.told_ns)} after this was found, "
            f"{where}: {life.verdict.why}"
        )
        return Verdict(
            "unkillable",
            "rank",
            rank,
            self._node,
            found.state,
            Strength.FACT,
            why,
            life.verdict.stalled_ns,
        )

    def _save(self, pids: dict[int, int]) -> None:
        """On the thread."""
        home = self._settings.journal_path.parent
        number = 1 + max(
            (int(path.name[7:]) for path in home.glob("stacks-*") if path.name[7:].isdigit()),
            default=0,
        )
        directory = home / f"stacks-{number}"
        found = stacks.take(pids, self._deadlines.stacks_ns / S_NS)
        try:
            stacks.save(directory, found)
            self.stacks = str(directory)
            self._journal.record(
                "stacks",
                f"the stacks of {len(found)} ranks are in {directory}",
                directory=str(directory),
            )
        except OSError as error:
            self._journal.record(
                "stacks", f"the stacks could not be saved ({error})", logging.WARNING
            )


def _grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _on_a_thread(work: Callable[..., T], *arguments: Any) -> Future[T]:
    """Not a pool's: the interpreter would wait for it at its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)
            raise

    threading.Thread(target=run, name="keepstep-watch", daemon=True).start()
    return future
