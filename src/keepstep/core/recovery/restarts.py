"""Restarts: what follows when a rank of this node ends, a signal arrives, or another node says
something.

Comes in: what happened and when. Goes out: at most one action with its reason. Never waits, never
asks. One life of the ranks is what lies between two `RanksStarted`; before it the nodes meet, and
it is over when all nodes' ranks have ended well or one restarts.

The cheapest rung first: ranks that can stay in their process do (`keep`), and only what is missing
is started. When two restarts have brought no new step, or somebody does not take part in one in
time, all ranks start anew. From the fourth in a row on the nodes wait before they meet, longer each
time: what hinders them may pass. A node whose hardware is suspect (`core/recovery/recurrence.py`)
leaves its place to a spare (`leave`) where memory can do without it, and so does one with a sick
part where somebody asked for that. What is not tried again: a program that is at fault, what a
person has to decide, and a cause whose budget is used up (`core/recovery/restart_budget.py`).

Invariant: at most `max_restarts` restarts are ordered, of no cause in a row more than its budget,
and after `End` nothing at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from keepstep.core.recovery.recurrence import Recurrence
from keepstep.core.recovery.restart_budget import RestartBudget, Spent
from keepstep.model.failure import DEFAULT_BUDGET, Cause, Failure, Finding
from keepstep.model.parts import PartPolicy
from keepstep.model.restarts import (
    END_WITHIN_NS,
    Action,
    AllEndedWell,
    AttemptWanted,
    AwaitOthers,
    End,
    Event,
    Exit,
    LeaveWanted,
    MeetingLost,
    PartSick,
    Progressed,
    RanksExited,
    RanksStarted,
    RanksUndead,
    RegroupLate,
    Reported,
    RestartAll,
    RestoreRefused,
    SignalRanks,
    SignalReceived,
    Stopped,
    Tell,
    TimeUp,
)
from keepstep.model.signals import SIGHUP, SIGTERM, signal_words
from keepstep.model.units import S_NS, counted, every, human_ns

PERSIST_WITHIN_NS = 30 * S_NS  # the notice before a preemption is rarely longer
STOP_WITHIN_NS = 5 * S_NS
# when steps are unknown: importing torch and joining a group take some seconds of this
EARLY_NS = 10 * S_NS
SAME_CRASHES = 3
CODE_AT_FAULT = 70  # the exit code that says it: EX_SOFTWARE of sysexits.h
CODE_REFUSED = 2  # as for any error keepstep names
# Of the restarts in a row without a new step the first so many let ranks stay in their process, and
# so many follow at once.
KEPT_IN_VAIN = 2
AT_ONCE = 3
FIRST_WAIT_NS = 1 * S_NS
LONGEST_WAIT_NS = 60 * S_NS


class _Stage(Enum):
    MEETING = "meeting"
    RUNNING = "running"
    ENDED_WELL = "ended well"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class _Setback:
    """Why all ranks have to find together anew; `exit`, when it was one of this node's."""

    fact: str
    failure: Failure | None
    why_not_keep: str
    exit: Exit | None = None
    expendable: bool = False
    heard: bool = False  # another node has said it to all
    least: int = 0
    wait_ns: int = 0  # as heard
    leaves: bool = False  # it is why all restart


@dataclass
class Restarts:
    world_size: int
    max_restarts: int
    has_store: bool
    budget: RestartBudget = field(default_factory=lambda: RestartBudget(DEFAULT_BUDGET))
    restarts: int = 0
    _stage: _Stage = _Stage.MEETING
    _running: set[int] = field(default_factory=set)
    _started_ns: int = 0
    _first_started_ns: int = 0
    _best_step: int = -1
    _crashes: list[Failure] = field(default_factory=list)  # in a row, without a new step
    _recurrence: Recurrence = field(default_factory=Recurrence)
    _life: int = 0
    _hosts: tuple[str, ...] = ()
    _signal: str = ""
    _exit_code: int = 0
    _end_within_ns: int = END_WITHIN_NS
    _lost: str = ""
    _in_vain: int = 0  # restarts in a row without a new step
    _sick: str = ""  # the part for which this node is to leave its place at the next restart
    _was_well: bool = False  # all ranks had ended well when others wanted another attempt

    @property
    def awaited_step(self) -> int | None:
        """When newer ones are done `Progressed` is to be told: that decides about a suspicion."""
        return self._recurrence.awaited_step if self._stage is _Stage.RUNNING else None

    def handle(self, event: Event) -> Action | None:
        """The one thing that follows from `event`; None when there is nothing to do but wait."""
        if self._stage is _Stage.OVER:
            return None
        if isinstance(event, RanksStarted):
            self._stage, self._started_ns, self._hosts = _Stage.RUNNING, event.at_ns, event.hosts
            self._first_started_ns = self._first_started_ns or event.at_ns
            self._life += 1
            self._running = set(range(event.first_rank, event.first_rank + self.world_size))
            return None
        if isinstance(event, RanksExited):
            return self._exited(event)
        if isinstance(event, Progressed):
            found = (
                self._recurrence.passed(event.completed_step, self._hosts)
                if self._stage is _Stage.RUNNING
                else None
            )
            return Tell(found) if found else None
        if isinstance(event, Reported):
            return self._reported(event)
        if isinstance(event, SignalReceived):
            return self._signalled(event)
        if isinstance(event, LeaveWanted):
            return self._leave(event)
        if isinstance(event, PartSick):
            return self._part_sick(event)
        if isinstance(event, RanksUndead):
            stuck = " and ".join(str(r) for r in event.ranks)
            return self._end(
                1,
                f"gave up: rank {stuck} hangs in the kernel, outlived SIGKILL, and may "
                "write again when it wakes up",
            )
        if isinstance(event, TimeUp):
            left = counted(len(self._running), "rank")
            late = f"{left} did not leave within {STOP_WITHIN_NS / S_NS:.0f} s"
            return (
                self._end(self._exit_code, f"{self._signal}; {late}")
                if self._stage is _Stage.STOPPING
                else None
            )
        return self._others(event)

    def _exited(self, event: RanksExited) -> Action | None:
        if self._stage is _Stage.MEETING:
            return None  # one more that stayed in its process and is to be started now
        self._running -= {e.rank for e in event.exits}
        failures = [e for e in event.exits if e.code]
        if self._stage is _Stage.RUNNING and failures:
            # A kill explains the other ranks' errors; their errors never explain a kill, least of
            # all when they speak of a peer.
            return self._failure(
                min(failures, key=lambda e: (e.blamed.cause is Cause.UNKNOWN, e.code > 0, e.rank)),
                event,
            )
        if self._running:
            return None  # ranks seldom end in the same moment
        if self._stage is _Stage.STOPPING:
            return replace(self._end(self._exit_code, self._signal), is_told=True)
        self._stage = _Stage.ENDED_WELL
        took = _seconds(event.at_ns - self._first_started_ns)
        why = (
            f"{every(self.world_size, 'rank')} ended well {took} after the start; "
            f"{counted(self.restarts, 'restart')}"
        )
        return self._end(0, f"{why}; {self._lost}") if self._lost else AwaitOthers(why)

    def _failure(self, cause: Exit, event: RanksExited) -> Action:
        life_ns = event.at_ns - self._started_ns
        failure = replace(cause.blamed, completed_step=event.completed_step)
        self._notice_progress(life_ns, event.completed_step)
        if cause.is_stop:
            return self._end(CODE_REFUSED, f"a person is to decide: {cause}")
        if cause.is_refusal and failure.step is None and self._is_refused_for_good():
            return self._end(CODE_REFUSED, f"nobody may train: {cause}")
        why_not_keep = self._why_not_keep(event.able)
        return self._again(
            _Setback(
                f"{cause} {self._since_start(event.at_ns)}",
                failure,
                why_not_keep,
                cause,
                event.expendable,
            )
        )

    def _since_start(self, at_ns: int) -> str:
        """Some ranks may have lived on when others were last started."""
        began = "start" if self._started_ns == self._first_started_ns else "the last recovery"
        return f"{_seconds(at_ns - self._started_ns)} after {began}"

    def _is_refused_for_good(self) -> bool:
        """A refusal at the very start comes again at every other one. Where the job has trained it
        may pass: what took the memory, say, is of the life before."""
        has_trained = self._best_step >= 0
        return not has_trained or bool(self._crashes)

    def _why_not_keep(self, able: bool) -> str:
        if not able:
            return "not all ranks of this node have said that they can stay in their process"
        if self._in_vain >= KEPT_IN_VAIN:
            return f"{self._in_vain} restarts in a row have brought no new step"
        return ""

    def _reported(self, event: Reported) -> Action | None:
        """Which of several nodes' words about one life was heard first is chance; what they say
        together is not."""
        for failure in event.failures:
            finding = self._recurrence.note(failure, self._life)
            if finding is not None and finding.kind == "code":
                return self._end(CODE_AT_FAULT, f"gave up: {finding.why}", finding=finding)
        return None

    def _again(self, setback: _Setback) -> Action:
        failure, finding, spent = setback.failure, None, None
        if failure is not None:
            spent = self.budget.spend(failure.cause, failure.completed_step)
            finding = self._recurrence.note(failure, self._life)
            if failure.cause in (Cause.CRASH, Cause.OOM):
                self._crashes.append(failure)
        finding = self._program_is_wrong(finding) or finding
        if give_up := self._why_give_up(finding, spent):
            code = CODE_AT_FAULT if finding is not None and finding.kind == "code" else 1
            return self._end(
                code, f"gave up: {setback.fact}; {give_up}", cause=setback.exit, finding=finding
            )
        self.restarts += 1
        self._in_vain += 1
        wait_ns = setback.wait_ns if setback.heard else _wait_ns(self._in_vain)
        self._was_well = self._stage is _Stage.ENDED_WELL
        self._stage = _Stage.MEETING
        self._running.clear()
        count = (
            f"restart {self.restarts} of "
            f"{self.max_restarts}{f'; {spent.why}' if spent and spent.why else ''}"
        )
        is_suspect = finding is not None or bool(self._sick)
        leave = setback.leaves or (setback.expendable and is_suspect)
        why_not_keep = (
            "its hardware is suspect, and a spare may take its place"
            if leave
            else setback.why_not_keep
        )
        keep = not why_not_keep
        plan = (
            "starting what is missing, the others wait"
            if keep
            else f"restarting {every(self.world_size, 'rank')}{self._from_memory(failure)}"
        )
        if wait_ns:
            plan += f" in {human_ns(wait_ns)}: the restarts before this one brought no new step"
        mine = None if setback.heard else failure
        return RestartAll(
            f"{setback.fact}; {plan} ({count})",
            setback.fact,
            mine,
            keep,
            why_not_keep,
            leave,
            finding,
            setback.least,
            wait_ns,
        )

    def _leave(self, event: LeaveWanted) -> Action | None:
        """Nothing has failed: the last restart is not used for that."""
        if self._stage is not _Stage.RUNNING or self.restarts + 1 >= self.max_restarts:
            return None
        self._notice_progress(event.at_ns - self._started_ns, event.completed_step)
        return self._again(_Setback(event.why, None, "", leaves=True))

    def _part_sick(self, event: PartSick) -> Action | None:
        """What somebody asked for in that case. Where this cannot be now it is for the next
        restart."""
        self._sick = event.why
        is_running = self._stage is _Stage.RUNNING
        if event.policy is PartPolicy.STOP and is_running:
            self._signal = f"the job ends for a sick part: {event.why}"
            return self._stop(SIGTERM, 1, f"; {signal_words(SIGTERM)} to {self._how_many()}")
        if event.policy is PartPolicy.LEAVE and is_running and event.expendable:
            self._notice_progress(event.at_ns - self._started_ns, event.completed_step)
            return self._again(_Setback(event.why, None, "", leaves=True))
        return None

    def _program_is_wrong(self, finding: Finding | None) -> Finding | None:
        """Whether it failed too often without a new step, whatever it said and wherever that
        was; twice is enough of the same error before the first step."""
        if finding is None and (early := self._same_before_any_step()):
            why = (
                f"the program failed twice in the same way before keepstep.protect "
                f"({early[-1].error}), a restart will not help"
            )
            return Finding("code", why, early)
        if len(self._crashes) < SAME_CRASHES or (finding is not None and finding.kind == "code"):
            return None
        why = (
            f"the program failed {len(self._crashes)} times in a row without a new step, a "
            "restart will not help"
        )
        if finding is not None:
            why += f"; {finding.why}; no other hardware was there to try it on"
        return Finding("code", why, tuple(self._crashes))

    def _same_before_any_step(self) -> tuple[Failure, ...]:
        """The last two crashes, if they were the same and in no step: what a missing module or
        file, or a typo, looks like."""
        last = self._crashes[-2:]
        told = {failure.error for failure in last if failure.step is None}
        is_same = len(last) == 2 and len(told) == 1 and "" not in told
        early = all(failure.step is None for failure in last)
        return tuple(last) if is_same and early else ()

    def _why_give_up(self, finding: Finding | None, spent: Spent | None) -> str:
        if finding is not None and finding.kind == "code":
            return finding.why
        if spent is not None and spent.is_too_much:
            return f"the budget of this cause is used up: {spent.why}"
        if self.restarts >= self.max_restarts:
            return f"all {self.max_restarts} restarts are used up"
        return self._lost

    def _others(
        self,
        event: AttemptWanted | RegroupLate | Stopped | AllEndedWell | RestoreRefused | MeetingLost,
    ) -> Action | None:
        if self._stage is _Stage.STOPPING:
            return None  # it ends here anyway
        if isinstance(event, RestoreRefused):
            return self._refused(event)
        if isinstance(event, RegroupLate):
            if self._stage is not _Stage.RUNNING:
                return None
            late = " and ".join(str(r) for r in event.ranks)
            how = (
                f"did not find its peers again within {_seconds(event.within_ns)}"
                if event.within_ns
                else "does not look for its peers any more"
            )
            return self._again(_Setback(f"rank {late} {how}", None, "it has just been tried"))
        if isinstance(event, AttemptWanted):
            if self._stage is _Stage.MEETING:
                return None
            # All nodes' ranks are at the same step: a program that fails on another node every time
            # is as wrong as if it failed here.
            self._notice_progress(event.at_ns - self._started_ns, event.completed_step)
            why_not = self._why_not_keep(event.able)
            if event.decided:
                why_not = "" if event.able else "so it was decided for all nodes"
            return self._again(
                _Setback(
                    event.why,
                    event.failure,
                    why_not,
                    heard=event.decided,
                    wait_ns=event.wait_ns,
                )
            )
        if isinstance(event, Stopped):
            self._signal = f"told to stop: {event.why}"
            if event.signum and self._running:
                # what they say ends with the signal, and to how many ranks it went there
                return self._stop(event.signum, event.code, f", and to {self._how_many()} here")
            return self._end(event.code, self._signal)
        if isinstance(event, AllEndedWell):
            return self._end(0, event.why)
        self._lost = event.why
        if self._stage is _Stage.MEETING and not self._was_well:
            return self._end(CODE_REFUSED if event.is_refused else 1, f"gave up: {event.why}")
        return (
            self._end(0, f"{every(self.world_size, 'rank')} ended well; {event.why}")
            if self._stage in (_Stage.ENDED_WELL, _Stage.MEETING)
            else None
        )

    def _refused(self, event: RestoreRefused) -> Action | None:
        """Where a lost node may come back the job waits for it: the program has done nothing."""
        if event.least and self._stage is not _Stage.RUNNING:
            return None
        fact = f"nobody may train: {event.why}"
        if not event.least or self.restarts >= self.max_restarts:
            return self._end(CODE_REFUSED, fact)
        why_not = "nobody may train with so few nodes"
        return self._again(_Setback(fact, None, why_not, least=event.least))

    def _from_memory(self, failure: Failure | None) -> str:
        """Where no step has been completed nothing is there."""
        is_early = failure is not None and failure.completed_step is None
        return "" if is_early and self._best_step < 0 else " from memory"

    def _notice_progress(self, life_ns: int, completed_step: int | None) -> None:
        """A program that fails again and again at the same place is wrong, and restarting it hides
        that."""
        advanced = (
            life_ns > EARLY_NS if completed_step is None else completed_step > self._best_step
        )
        self._best_step = max(self._best_step, -1 if completed_step is None else completed_step)
        if advanced:
            self._crashes.clear()
            self._in_vain = 0

    def _signalled(self, event: SignalReceived) -> Action | None:
        name = signal_words(event.signum)
        code = 128 + event.signum
        if self._stage is _Stage.STOPPING:
            if event.signum == SIGHUP:  # a closing terminal sends it twice
                return None
            return self._end(code, f"{self._signal}; then {name}: leaving at once", within_ns=0)
        when = self._since_start(event.at_ns) if self._running else "with no rank running"
        self._signal = (
            f"{'preempted' if event.signum in (SIGTERM, SIGHUP) else 'interrupted'} by {name} "
            f"{when}"
        )
        signum = SIGTERM
        if event.signum not in (SIGTERM, SIGHUP):
            signum, why = event.signum, "stopping all ranks"
        elif self.has_store:
            why = "the newest step all ranks hold goes to the store"
        else:
            why = "there is no store to save the newest step to"
        self._signal = f"{self._signal}: {why}"
        return self._stop(signum, code, f"; {signal_words(signum)} to {self._how_many()}")

    def _how_many(self) -> str:
        return counted(len(self._running), "rank")

    def _stop(self, signum: int, exit_code: int, to_whom: str) -> Action:
        """`to_whom`: what is told, behind the reason, only where there are ranks to stop."""
        self._stage, self._exit_code = _Stage.STOPPING, exit_code
        # The state outlives the ranks: they stop first, and the keeper then writes the newest step
        # there will ever be.
        if self.has_store and signum == SIGTERM:
            self._end_within_ns = PERSIST_WITHIN_NS
        if not self._running:
            return self._end(exit_code, self._signal)
        return SignalRanks(signum, self._signal + to_whom, STOP_WITHIN_NS, exit_code)

    def _end(
        self,
        exit_code: int,
        why: str,
        within_ns: int | None = None,
        cause: Exit | None = None,
        finding: Finding | None = None,
    ) -> End:
        self._stage = _Stage.OVER
        return End(
            exit_code == 0,
            exit_code,
            why,
            self._end_within_ns if within_ns is None else within_ns,
            cause,
            finding,
        )


def _wait_ns(in_vain: int) -> int:
    """Before the restart that is the `in_vain`-th in a row without a new step."""
    if in_vain <= AT_ONCE:
        return 0
    return int(min(FIRST_WAIT_NS << min(in_vain - AT_ONCE - 1, 10), LONGEST_WAIT_NS))


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / S_NS:.1f} s"
