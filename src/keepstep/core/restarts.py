"""Restarts: what follows when a rank of this node ends, a signal arrives, or another node says something.

Comes in: what happened and when. Goes out: at most one action with its reason. Never waits, never asks. One life of the ranks
is what lies between two `RanksStarted`; before it the nodes meet, and it is over when all nodes' ranks have ended well or one restarts.

The cheapest rung first: ranks that can stay in their process do (`keep`), and only what is missing is started. When that has been tried
twice without a new step, or somebody does not take part in it in time, all ranks start anew.

Invariant: at most `max_restarts` restarts are ordered, and after `End` nothing is ordered at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from keepstep.model.units import S_NS

SIGHUP, SIGINT, SIGQUIT, SIGTERM = 1, 2, 3, 15
OUTSIDE = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 9: "SIGKILL", 15: "SIGTERM"}
FAULTS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}  # what a program brings upon itself
NAMES = OUTSIDE | FAULTS

PERSIST_WITHIN_NS = 30 * S_NS  # the notice before a preemption is rarely longer
STOP_WITHIN_NS = 5 * S_NS
END_WITHIN_NS = 10 * S_NS
EARLY_NS = 10 * S_NS  # when steps are unknown: importing torch and joining a group take some seconds of this
SAME_CRASHES = 3
CODE_AT_FAULT = 70  # the exit code that says it: EX_SOFTWARE of sysexits.h
KEPT_IN_VAIN = 2


@dataclass(frozen=True, slots=True)
class Exit:
    """`code` as subprocess tells it: 0 ended well, n exit code, -n killed by signal n. `message`: from the rank's error file, or why it was
    killed."""

    rank: int
    code: int
    message: str = ""

    def __str__(self) -> str:
        if self.code == 0:
            return f"rank {self.rank} ended well"
        if self.code > 0:
            return f"rank {self.rank} exited with code {self.code}" + (f" ({self.message})" if self.message else "")
        return f"rank {self.rank} was killed by {signal_words(-self.code)}" + (f" ({self.message})" if self.message else "")


# -- what happens


@dataclass(frozen=True, slots=True)
class RanksStarted:
    """The node's ranks, `first_rank` and those behind it."""

    at_ns: int
    first_rank: int = 0


@dataclass(frozen=True, slots=True)
class RanksExited:
    """Exits noticed together. `completed_step` is the newest step any rank has told of, None when none ever did. `able`: the node's ranks,
    these among them, have said that they can stay in their process when a peer is lost."""

    exits: tuple[Exit, ...]
    at_ns: int
    completed_step: int | None = None
    able: bool = False


@dataclass(frozen=True, slots=True)
class RanksUndead:
    """These live on after SIGKILL: they hang in the kernel."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SignalReceived:
    signum: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class TimeUp:
    """The time that the last action was given is over."""


@dataclass(frozen=True, slots=True)
class RoundWanted:
    """All ranks have to find together anew for something that is not this node's; `crash` when the program failed there."""

    why: str
    at_ns: int
    crash: bool = False
    completed_step: int | None = None
    able: bool = False
    decided: bool = False  # already, for all nodes: `able` is then what they decided


@dataclass(frozen=True, slots=True)
class RegroupLate:
    """These were to stay in their process, or to take a place among those who do, and have not in time; `within_ns` 0: and never will."""

    ranks: tuple[int, ...]
    within_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """Another node has ended the job, by a signal (`signum`) or because it gave up (0)."""

    why: str
    code: int
    signum: int = 0


@dataclass(frozen=True, slots=True)
class AllEndedWell:
    """The ranks of all nodes."""

    why: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class MeetingLost:
    """The nodes have no place to meet any more."""

    why: str


Event = (
    RanksStarted | RanksExited | RanksUndead | SignalReceived | TimeUp | RoundWanted | RegroupLate | Stopped | AllEndedWell | MeetingLost
)


# -- what to do


@dataclass(frozen=True, slots=True)
class RestartAll:
    """Meet the other nodes, start what is missing. `keep`: ranks that can stay in their process do; else kill what is left first.
    `fact` and `crash` are for the others; `refused`: why `keep` is not."""

    why: str
    fact: str
    crash: bool = False
    keep: bool = False
    refused: str = ""


@dataclass(frozen=True, slots=True)
class AwaitOthers:
    """This node's ranks have all ended well; whether the job has depends on the other nodes' ranks."""

    why: str


@dataclass(frozen=True, slots=True)
class SignalRanks:
    """The job ends with `exit_code` when they have gone, or when the time is up."""

    signum: int
    why: str
    within_ns: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class End:
    """Kill what is left, give the keeper `within_ns` to clean up, leave with `exit_code`. `cause`: the failure that was too much."""

    ok: bool
    exit_code: int
    why: str
    within_ns: int = END_WITHIN_NS
    cause: Exit | None = None


Action = RestartAll | AwaitOthers | SignalRanks | End


class _Stage(Enum):
    MEETING = "meeting"
    RUNNING = "running"
    ENDED_WELL = "ended well"
    STOPPING = "stopping"
    OVER = "over"


@dataclass
class Restarts:
    world_size: int
    max_restarts: int
    has_store: bool
    restarts: int = 0
    _stage: _Stage = _Stage.MEETING
    _running: set[int] = field(default_factory=set)
    _started_ns: int = 0
    _best_step: int = -1
    _crashes: int = 0
    _signal: str = ""
    _exit_code: int = 0
    _end_within_ns: int = END_WITHIN_NS
    _lost: str = ""
    _kept_in_vain: int = 0

    def handle(self, event: Event) -> Action | None:
        """The one thing that follows from `event`; None when there is nothing to do but wait."""
        if self._stage is _Stage.OVER:
            return None
        if isinstance(event, RanksStarted):
            self._stage, self._started_ns = _Stage.RUNNING, event.at_ns
            self._running = set(range(event.first_rank, event.first_rank + self.world_size))
            return None
        if isinstance(event, RanksExited):
            return self._exited(event)
        if isinstance(event, SignalReceived):
            return self._signalled(event)
        if isinstance(event, RanksUndead):
            stuck = " and ".join(str(r) for r in event.ranks)
            return self._end(1, f"gave up: rank {stuck} hangs in the kernel, did not die of SIGKILL, and may write again when it wakes up")
        if isinstance(event, TimeUp):
            late = f"{len(self._running)} ranks did not leave within {STOP_WITHIN_NS / S_NS:.0f} s"
            return self._end(self._exit_code, f"{self._signal}; {late}") if self._stage is _Stage.STOPPING else None
        return self._others(event)

    def _exited(self, event: RanksExited) -> Action | None:
        if self._stage is _Stage.MEETING:
            return None  # one more that stayed in its process and is to be started now
        self._running -= {e.rank for e in event.exits}
        failures = [e for e in event.exits if e.code]
        if self._stage is _Stage.RUNNING and failures:
            # A kill explains the other ranks' errors; their errors never explain a kill.
            return self._failure(min(failures, key=lambda e: (e.code > 0, e.rank)), event)
        if self._running:
            return None  # ranks seldom end in the same moment
        if self._stage is _Stage.STOPPING:
            return self._end(self._exit_code, self._signal)
        self._stage = _Stage.ENDED_WELL
        took = _seconds(event.at_ns - self._started_ns)
        why = f"all {self.world_size} ranks ended well {took} after their start; {self.restarts} restarts"
        return self._end(0, f"{why}; {self._lost}") if self._lost else AwaitOthers(why)

    def _failure(self, cause: Exit, event: RanksExited) -> Action:
        life_ns = event.at_ns - self._started_ns
        crash = cause.code > 0 or -cause.code in FAULTS
        self._count_crash(crash, life_ns, event.completed_step)
        return self._again(f"{cause} {_seconds(life_ns)} after start", crash, cause, self._why_not_keep(event.able))

    def _why_not_keep(self, able: bool) -> str:
        if not able:
            return "not all ranks of this node have said that they can stay in their process"
        if self._kept_in_vain >= KEPT_IN_VAIN:
            return f"they stayed in their process {self._kept_in_vain} times in a row without a new step"
        return ""

    def _again(self, fact: str, crash: bool, cause: Exit | None, why_not_keep: str) -> Action:
        if self._crashes >= SAME_CRASHES:
            why = f"the program failed {self._crashes} times in a row without a new step, a restart will not help"
            return self._end(CODE_AT_FAULT, f"gave up: {fact}; {why}", cause=cause)
        if self.restarts >= self.max_restarts:
            return self._end(1, f"gave up: {fact}; all {self.max_restarts} restarts are used up", cause=cause)
        if self._lost:
            return self._end(1, f"gave up: {fact}; {self._lost}", cause=cause)
        self.restarts += 1
        self._stage = _Stage.MEETING
        self._running.clear()
        count = f"restart {self.restarts} of {self.max_restarts}"
        keep = not why_not_keep
        self._kept_in_vain = self._kept_in_vain + 1 if keep else 0
        plan = (
            "starting what is missing, the others stay in their process" if keep else f"restarting all {self.world_size} ranks from memory"
        )
        return RestartAll(f"{fact}; {plan} ({count})", fact, crash, keep, why_not_keep)

    def _others(self, event: RoundWanted | RegroupLate | Stopped | AllEndedWell | MeetingLost) -> Action | None:
        if self._stage is _Stage.STOPPING:
            return None  # it ends here anyway
        if isinstance(event, RegroupLate):
            if self._stage is not _Stage.RUNNING:
                return None
            late = " and ".join(str(r) for r in event.ranks)
            how = (
                f"did not find its peers again within {_seconds(event.within_ns)}"
                if event.within_ns
                else "ended and finds its peers no more"
            )
            fact = f"rank {late} {how}"
            return self._again(fact, False, None, "it has just been tried")
        if isinstance(event, RoundWanted):
            if self._stage is _Stage.MEETING:
                return None
            # All nodes' ranks are at the same step: a program that fails on another node every time is as wrong as if it failed here.
            self._count_crash(event.crash, event.at_ns - self._started_ns, event.completed_step)
            why_not = self._why_not_keep(event.able)
            if event.decided:
                why_not = "" if event.able else "so it was decided for all nodes"
            return self._again(event.why, False, None, why_not)
        if isinstance(event, Stopped):
            self._signal = f"told to stop: {event.why}"
            if event.signum and self._running:
                return self._stop(event.signum, event.code, "as the others do")
            return self._end(event.code, self._signal)
        if isinstance(event, AllEndedWell):
            return self._end(0, event.why)
        self._lost = event.why
        if self._stage is _Stage.MEETING:
            return self._end(1, f"gave up: {event.why}")
        return self._end(0, f"all {self.world_size} ranks ended well; {event.why}") if self._stage is _Stage.ENDED_WELL else None

    def _count_crash(self, crash: bool, life_ns: int, completed_step: int | None) -> None:
        """A program that fails again and again at the same place is wrong, and restarting it hides that."""
        advanced = life_ns > EARLY_NS if completed_step is None else completed_step > self._best_step
        self._best_step = max(self._best_step, -1 if completed_step is None else completed_step)
        if advanced:
            self._crashes = self._kept_in_vain = 0
        if crash:
            self._crashes += 1

    def _signalled(self, event: SignalReceived) -> Action | None:
        name = signal_words(event.signum)
        code = 128 + event.signum
        if self._stage is _Stage.STOPPING:
            if event.signum == SIGHUP:  # a closing terminal sends it twice
                return None
            return self._end(code, f"{self._signal}; then {name}: leaving at once", within_ns=0)
        when = f"{_seconds(event.at_ns - self._started_ns)} after start" if self._running else "with no rank running"
        self._signal = f"{'preempted' if event.signum in (SIGTERM, SIGHUP) else 'interrupted'} by {name} {when}"
        if event.signum not in (SIGTERM, SIGHUP):
            return self._stop(event.signum, code, "stopping all ranks")
        if self.has_store:
            return self._stop(SIGTERM, code, "the newest step all ranks hold goes to the store")
        return self._stop(SIGTERM, code, "there is no store to save the newest step to")

    def _stop(self, signum: int, exit_code: int, why: str) -> Action:
        self._stage, self._exit_code = _Stage.STOPPING, exit_code
        # The state outlives the ranks: they stop first, and the keeper then writes the newest step there will ever be.
        if self.has_store and signum == SIGTERM:
            self._end_within_ns = PERSIST_WITHIN_NS
        self._signal = f"{self._signal}: {why}"
        if not self._running:
            return self._end(exit_code, self._signal)
        why = f"{self._signal}; {signal_words(signum)} to {len(self._running)} ranks"
        return SignalRanks(signum, why, STOP_WITHIN_NS, exit_code)

    def _end(self, exit_code: int, why: str, within_ns: int | None = None, cause: Exit | None = None) -> End:
        self._stage = _Stage.OVER
        return End(exit_code == 0, exit_code, why, self._end_within_ns if within_ns is None else within_ns, cause)


def signal_words(signum: int) -> str:
    return f"{NAMES[signum]} ({signum})" if signum in NAMES else f"signal {signum}"


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / S_NS:.1f} s"
