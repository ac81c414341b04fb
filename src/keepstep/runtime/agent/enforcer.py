"""Enforcer: what the agent does about what its monitor sees of the node's ranks, and about their
ends.

Comes in: that it is time to look, or that a rank has ended. Goes out: diagnoses in the journal,
SIGKILL to the rank that a diagnosis blames, and events for `core/recovery/restarts.py`. Starts
nobody. A rank that was killed for a diagnosis comes back here as an end, like any other.

Invariant: a rank is killed at most once a life; a second diagnosis means that it outlived SIGKILL.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from keepstep.core.detection.diagnosis import cause_of
from keepstep.core.recovery.recurrence import normalised
from keepstep.model.diagnosis import Diagnosis
from keepstep.model.events import INFO, WARNING
from keepstep.model.failure import Cause, Failure
from keepstep.model.launch import ErrorReport, RankAssignment, RankEnd
from keepstep.model.restarts import AttemptWanted, Event, Exit, RanksUndead
from keepstep.model.signals import signal_words
from keepstep.runtime.agent.evidence_board import EvidenceBoard
from keepstep.runtime.agent.monitor import Monitor
from keepstep.runtime.agent.rank_server import RankServer
from keepstep.runtime.agent.world import AgentOptions, AgentWorld


@dataclass
class _WatchedAttempt:
    """What belongs to one attempt. `condemned`: ranks on this node that were killed for a diagnosis
    and have not ended yet; `failures`: ends that were no good ones."""

    condemned: set[int] = field(default_factory=set)
    failures: list[Exit] = field(default_factory=list)


class Enforcer:
    """Of one node's ranks, one attempt after the other."""

    def __init__(self, world: AgentWorld, options: AgentOptions, server: RankServer) -> None:
        self._world = world
        self._options = options
        self._server = server
        self._node = 0
        self._first_rank = 0
        self._attempt = _WatchedAttempt()
        self._monitor = self._new_monitor()

    def _new_monitor(self) -> Monitor:
        world = self._world
        return Monitor(
            world.memory,
            world.probes,
            world.executor,
            world.journal,
            self._options.job_dir,
            self._options.deadlines,
            self._node,
        )

    @property
    def failures(self) -> list[Exit]:
        """The ends in this attempt that were no good ones."""
        return self._attempt.failures

    def prepare(self) -> None:
        """The attempt before is over."""
        self._attempt = _WatchedAttempt()

    def begin(
        self, place: RankAssignment, pids: Mapping[int, int], board: EvidenceBoard | None
    ) -> None:
        """These processes are the node's ranks, by their number in the job."""
        self._first_rank = place.first_rank
        if self._node != place.node:
            self._node = place.node
            self._monitor.close()
            self._monitor = self._new_monitor()
        self._monitor.begin(pids, self._world.clock.monotonic_ns(), board)

    @property
    def completed_step(self) -> int | None:
        """The newest step that all ranks of this node have completed in this attempt."""
        return self._monitor.completed_step

    def forget(self, ranks: Collection[int]) -> None:
        """These ranks on this node are being killed, and nobody asks why they end."""
        for rank in ranks:
            self._monitor.forget(self._first_rank + rank)

    def close(self) -> None:
        self._monitor.close()

    # -- ranks that do not go on

    def look(self) -> Iterator[Event]:
        now_ns = self._world.clock.monotonic_ns()
        for diagnosis in self._monitor.tick(now_ns):
            yield from self._act_on(diagnosis, now_ns)

    def _act_on(self, diagnosis: Diagnosis, now_ns: int) -> Iterator[Event]:
        """A rank that will not go on by itself is killed, and its end is told; if it is nobody in
        particular, all start anew."""
        self._tell(diagnosis, WARNING)
        if diagnosis.culprit is None:
            failure = Failure(Cause.HANG, host=self._options.host, error=diagnosis.kind)
            yield AttemptWanted(diagnosis.why, now_ns, failure)
            return
        rank = diagnosis.culprit - self._first_rank
        if rank in self._attempt.condemned:  # killed already, and still there
            yield RanksUndead((diagnosis.culprit,))
        elif rank in self._world.processes.living:
            self._attempt.condemned.add(rank)
            self._world.processes.kill([rank])

    def _tell(self, diagnosis: Diagnosis, level: int) -> None:
        self._world.journal.record(
            "diagnosis",
            diagnosis.why,
            level,
            kind=diagnosis.kind,
            culprit=diagnosis.culprit,
            state=diagnosis.state,
            strength=str(diagnosis.strength),
            stalled_ns=diagnosis.stalled_ns,
        )

    # -- ranks that have ended

    def explain(self, end: RankEnd) -> Exit:
        """What the end of a rank means."""
        has_ended_training = self._server.has_ended_training(end.pid)
        self._server.forget(end.pid)
        rank = self._first_rank + end.rank
        code, message = end.code, end.report.message
        if has_ended_training and code < 0:
            # By a thread of an abandoned group, say, while the interpreter was being taken down.
            why = (
                f"rank {rank} had ended its training well when it died of {signal_words(-code)}: "
                "that counts as a good end"
            )
            self._world.journal.record(
                "late-death", why, WARNING, rank=rank, pid=end.pid, code=code
            )
            code = 0
        diagnosis = self._monitor.explain_exit(rank, code, message)
        step = self._monitor.step_of(rank)
        self._monitor.forget(rank)
        if diagnosis.kind == "premature-exit":
            code, message = 1, diagnosis.why  # the others would wait for it for ever
        if end.rank in self._attempt.condemned:
            self._attempt.condemned.discard(end.rank)
            message = diagnosis.why
        elif code:
            self._tell(diagnosis, INFO)
        failure = self._failure(end.rank, diagnosis, step, end.report) if code else None
        found = Exit(rank, code, message, failure, bool(code) and end.report.is_refusal)
        if code:
            self._attempt.failures.append(found)
        level = WARNING if code else INFO
        why = f"{found} (process {end.pid})"
        self._world.journal.record(
            "rank-exited", why, level, rank=rank, pid=end.pid, code=code, message=message
        )
        return found

    def _failure(
        self, local_rank: int, diagnosis: Diagnosis, step: int | None, report: ErrorReport
    ) -> Failure:
        """As all nodes are to know it."""
        devices = self._options.devices
        is_deadly = diagnosis.is_deadly
        error = normalised(report.message) or diagnosis.state
        return Failure(
            cause=cause_of(diagnosis),
            rank=self._first_rank + local_rank,
            host=self._options.host,
            device=devices[local_rank] if local_rank < len(devices) else "",
            step=step,
            error=f"{diagnosis.kind}, {diagnosis.state}" if is_deadly else error,
            place=report.place,
            files=self._monitor.stacks if is_deadly else report.path,
        )
