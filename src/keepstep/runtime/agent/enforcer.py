"""Watching: what the agent does about what its watch sees of the node's ranks, and about their
exits.

Comes in: that it is time to look, or that a rank has ended. Goes out: verdicts in the journal,
SIGKILL to whoever a verdict condemns, and events for `core/recovery/restarts.py`. Starts nobody. A
rank that was killed for a verdict comes back here as an exit, by its pidfd, like any other.

Invariant: a rank is killed at most once a life; who is condemned again lives on after SIGKILL.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from keepstep.config import Settings
from keepstep.core.detection.deadlines import Deadlines
from keepstep.core.detection.diagnosis import cause_of
from keepstep.core.recovery.recurrence import normalised
from keepstep.edge.os.error_file import LastWords
from keepstep.edge.os.journal import Journal
from keepstep.edge.torch.ranks import Ranks
from keepstep.model.failure import Cause, Failure
from keepstep.model.launch import Place
from keepstep.model.restarts import Event, Exit, RanksUndead, RoundWanted
from keepstep.model.signals import signal_words
from keepstep.model.verdict import Verdict
from keepstep.runtime.agent.monitor import Board, Watch
from keepstep.runtime.agent.rank_server import RankLines


class Watching:
    """Of one node's ranks, one life after the other. `host`: as the other nodes know it; `devices`:
    the ranks', one each, or none. `failures`: the exits of this life that were no good ends."""

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        deadlines: Deadlines,
        ranks: Ranks,
        lines: RankLines,
        host: str,
        devices: Sequence[str] = (),
    ) -> None:
        self._settings, self._journal, self._deadlines, self._ranks, self._lines = (
            settings,
            journal,
            deadlines,
            ranks,
            lines,
        )
        self._host, self._devices = host, devices
        self._watch: Watch | None = None
        self._node = -1
        self._first_rank = 0
        # local ranks that were killed for a verdict and have not gone yet
        self._condemned: set[int] = set()
        self.failures: list[Exit] = []
        self.due_ns: int | None = None  # when to look at the ranks again

    def prepare(self) -> None:
        """The life before is over."""
        self.failures = []
        self._condemned.clear()

    def begin(
        self, place: Place, pids: Mapping[int, int], board: Board | None, now_ns: int
    ) -> None:
        """These processes are the node's ranks, by their number in the job."""
        if self._watch is None or self._node != place.node:
            self._watch = Watch(self._settings, self._journal, self._deadlines, place.node)
        self._node, self._first_rank = place.node, place.first_rank
        self._watch.begin(pids, now_ns, board)
        self.due_ns = now_ns + self._deadlines.tick_ns

    @property
    def completed_step(self) -> int | None:
        """The newest step that all ranks of this node have completed in this life."""
        return None if self._watch is None else self._watch.completed_step

    def forget(self, ranks: Collection[int]) -> None:
        """These local ranks are being killed, and nobody asks why they end."""
        if self._watch is not None:
            for rank in ranks:
                self._watch.forget(self._first_rank + rank)

    def look(self, now_ns: int) -> Iterator[Event]:
        if self.due_ns is not None and now_ns >= self.due_ns and self._watch is not None:
            self.due_ns = now_ns + self._deadlines.tick_ns
            for verdict in self._watch.tick(now_ns):
                yield from self._carry_out(verdict, now_ns)

    def _carry_out(self, verdict: Verdict, now_ns: int) -> Iterator[Event]:
        """A rank that will not go on by itself is killed, and its pidfd tells of its end; if it is
        nobody in particular, all start anew."""
        self._tell(verdict, logging.WARNING)
        if verdict.culprit is None:
            failure = Failure(Cause.HANG, host=self._host, error=verdict.kind)
            yield RoundWanted(verdict.why, now_ns, failure)
            return
        local_rank = verdict.culprit - self._first_rank
        if local_rank in self._condemned:  # killed already, and still there
            yield RanksUndead((verdict.culprit,))
        elif local_rank in self._ranks.pidfds:
            self._condemned.add(local_rank)
            with suppress(ProcessLookupError):
                os.killpg(self._ranks.pid(local_rank), signal.SIGKILL)

    def _tell(self, verdict: Verdict, level: int) -> None:
        about = {
            "kind": verdict.kind,
            "culprit": verdict.culprit,
            "state": verdict.state,
            "strength": str(verdict.strength),
        }
        self._journal.record("verdict", verdict.why, level, stalled_ns=verdict.stalled_ns, **about)

    def reap(self, local_rank: int) -> Exit:
        """The end of a rank whose pidfd is readable."""
        pid = self._ranks.pid(local_rank)
        ended = self._lines.has_ended(pid)
        self._lines.forget(pid)
        code, words = self._ranks.reap(local_rank)
        message = words.message
        rank = self._first_rank + local_rank
        # by a thread of an abandoned group, say, while the interpreter was being taken down
        if ended and code < 0:
            why = (
                f"rank {rank} had ended its training well when it died of {signal_words(-code)}: "
                "that counts as a good end"
            )
            self._journal.record("late-death", why, logging.WARNING, rank=rank, pid=pid, code=code)
            code = 0
        assert self._watch is not None
        verdict = self._watch.explain_exit(rank, code, message)
        step = self._watch.step_of(rank)
        self._watch.forget(rank)
        if verdict.kind == "premature-exit":
            code, message = 1, verdict.why  # the others would wait for it for ever
        if local_rank in self._condemned:
            self._condemned.discard(local_rank)
            message = verdict.why
        elif code:
            self._tell(verdict, logging.INFO)
        found = Exit(
            rank, code, message, self._failure(local_rank, verdict, step, words) if code else None
        )
        if code:
            self.failures.append(found)
        level = logging.WARNING if code else logging.INFO
        self._journal.record(
            "rank-exited",
            f"{found} (process {pid})",
            level,
            rank=rank,
            pid=pid,
            code=code,
            message=message,
        )
        return found

    def _failure(
        self, local_rank: int, verdict: Verdict, step: int | None, words: LastWords
    ) -> Failure:
        """As all nodes are to know it."""
        assert self._watch is not None
        error = normalised(words.message) or verdict.state
        if verdict.is_deadly:
            error = f"{verdict.kind}, {verdict.state}"
        files = self._watch.stacks if verdict.is_deadly else words.path
        device = self._devices[local_rank] if local_rank < len(self._devices) else ""
        rank = self._first_rank + local_rank
        return Failure(
            cause_of(verdict), rank, self._host, device, step, error, place=words.place, files=files
        )
