"""Enforcer: what the agent does about what its monitor sees of the node's ranks, and about their
ends.

Comes in: that it is time to look, or that a rank has ended. Goes out: diagnoses and sick parts in
the journal, SIGKILL to the rank that a diagnosis blames, and events for
`core/recovery/restarts.py`. Starts nobody. A rank that was killed for a diagnosis comes back here
as an end, like any other.

Invariant: a rank is killed at most once a life; a second diagnosis means that it outlived SIGKILL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from keepstep.core.detection.diagnosis import cause_of, premature_exit
from keepstep.core.economics.swap_price import ASSUMED, SwapPrice
from keepstep.core.postmortem.message import clause_of, pattern_of
from keepstep.core.recovery.recurrence import normalised
from keepstep.model.diagnosis import Diagnosis
from keepstep.model.events import INFO, WARNING
from keepstep.model.failure import Cause, Failure
from keepstep.model.launch import ErrorReport, RankAssignment, RankEnd
from keepstep.model.restarts import AttemptWanted, Event, Exit, LeaveWanted, RanksUndead
from keepstep.model.signals import signal_words
from keepstep.runtime.agent.evidence_board import EvidenceBoard
from keepstep.runtime.agent.monitor import Monitor
from keepstep.runtime.agent.parts_watch import PartsWatch
from keepstep.runtime.agent.rank_server import RankServer
from keepstep.runtime.agent.slow_ranks import SlowRanks
from keepstep.runtime.agent.steps_board import StepsBoard
from keepstep.runtime.agent.world import AgentOptions, AgentWorld


def _not_wished() -> str:
    return 'slow_ranks is not "swap"'


class _GoodEnd(NamedTuple):
    """A rank of this node that has ended well, and the step that it was in."""

    local_rank: int
    diagnosis: Diagnosis
    step: int | None


@dataclass
class _WatchedAttempt:
    """What belongs to one attempt. `condemned`: ranks on this node that were killed for a diagnosis
    and have not ended yet; `failures`: ends that were no good ones; `good_ends`: the others."""

    condemned: set[int] = field(default_factory=set)
    failures: list[Exit] = field(default_factory=list)
    good_ends: list[_GoodEnd] = field(default_factory=list)


class Enforcer:
    """Of one node's ranks, one attempt after the other."""

    def __init__(
        self,
        world: AgentWorld,
        options: AgentOptions,
        server: RankServer,
        why_no_swap: Callable[[], str] = lambda: "",
        swap_price: Callable[[], SwapPrice] = lambda: ASSUMED,
    ) -> None:
        """why_no_swap: why a spare cannot take this node's place, although that is wished for.
        swap_price: what it would cost."""
        self._world = world
        self._options = options
        self._server = server
        self._node = 0
        self._first_rank = 0
        self._attempt = _WatchedAttempt()
        self._monitor = self._new_monitor()
        self._slow = (
            SlowRanks(
                world.memory,
                world.probes,
                world.executor,
                world.journal,
                options.job_dir,
                why_no_swap if options.swaps_slow_nodes else _not_wished,
                lambda: self.completed_step,
                lambda: () if self._parts is None else self._parts.parts,
                options.devices,
                options.canary_every_ns,
                swap_price,
            )
            if options.tells_slow_ranks
            else None
        )
        self._parts = self._new_parts_watch()

    def _new_parts_watch(self) -> PartsWatch | None:
        world, policies = self._world, self._options.part_policies
        if world.parts is None or policies is None:
            return None
        return PartsWatch(
            world.parts.prober,
            world.clock,
            world.memory,
            world.journal,
            self._options.job_dir,
            policies,
            world.parts.table,
            self._options.canary_every_ns,
        )

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
        if self._slow is not None:
            steps = None
            if board is not None and place.nodes > 1:
                steps = StepsBoard(board.meets_in, place.attempt, place.node, place.nodes)
            self._slow.begin(pids, place.world_size, steps)

    @property
    def completed_step(self) -> int | None:
        """The newest step that all ranks of this node have completed in this attempt."""
        return self._monitor.completed_step

    def forget(self, ranks: Collection[int]) -> None:
        """These ranks on this node are being killed, and nobody asks why they end."""
        for rank in ranks:
            self._forget(self._first_rank + rank)

    def _forget(self, rank: int) -> None:
        self._monitor.forget(rank)
        if self._slow is not None:
            self._slow.forget(rank)

    def close(self) -> None:
        self._monitor.close()
        if self._slow is not None:
            self._slow.close()
        if self._parts is not None:
            self._parts.close()

    # -- ranks that do not go on, parts that are sick

    def look(self) -> Iterator[Event]:
        now_ns = self._world.clock.monotonic_ns()
        for diagnosis in self._monitor.tick(now_ns):
            yield from self._act_on(diagnosis, now_ns)
        if self._parts is not None:
            yield from self._parts.tick()

    @property
    def look_at_steps_after_ns(self) -> int | None:
        """None: nobody wants to know who is slow."""
        return None if self._slow is None else self._slow.tick_ns

    def look_at_steps(self) -> Iterator[Event]:
        """Ranks that are slow."""
        now_ns = self._world.clock.monotonic_ns()
        if self._slow is not None and (why := self._slow.tick(now_ns)):
            yield LeaveWanted(why, now_ns, self.completed_step)

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
        self._forget(rank)
        is_early = diagnosis.kind == "premature-exit"
        if is_early:
            code, message = 1, diagnosis.why  # the others would wait for it for ever
        if end.rank in self._attempt.condemned:
            self._attempt.condemned.discard(end.rank)
            message = diagnosis.why
        elif code:
            self._tell(diagnosis, INFO)
        else:
            self._attempt.good_ends.append(_GoodEnd(end.rank, diagnosis, step))
        failure = self._failure(end.rank, diagnosis, step, end.report) if code else None
        report = end.report if code else ErrorReport()
        is_refusal, is_stop = report.is_refusal, report.is_stop
        found = Exit(rank, code, message, failure, is_refusal, is_stop, is_early)
        if code:
            self._attempt.failures.append(found)
        level = WARNING if code else INFO
        clause, meaning = self._meaning(end.report.message) if code else ("", {})
        why = f"{found} (process {end.pid}){clause}"
        facts = {"rank": rank, "pid": end.pid, "code": code, "message": message, **meaning}
        self._world.journal.record("rank-exited", why, level, **facts)
        return found

    def left_early(self, waiting: int) -> tuple[Exit, ...]:
        """Those that have ended well in this attempt, and that rank still needs: its collective has
        failed. Each once."""
        found, self._attempt.good_ends = self._attempt.good_ends, []
        exits = []
        for local_rank, ended, step in found:
            diagnosis = premature_exit(ended, waiting)
            self._tell(diagnosis, INFO)
            failure = self._failure(local_rank, diagnosis, step, ErrorReport())
            rank = self._first_rank + local_rank
            exits.append(Exit(rank, 1, diagnosis.why, failure, is_early=True))
        self._attempt.failures += exits
        return tuple(exits)

    def _meaning(self, message: str) -> tuple[str, dict[str, str]]:
        """What the table of patterns says of the program's last words: for the sentence, and as
        data. Nothing is decided by it."""
        table = self._world.patterns
        if table is None or (pattern := pattern_of(message, table)) is None:
            return "", {}
        return clause_of(pattern, table), {"failure_class": pattern.failure, "role": pattern.role}

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
