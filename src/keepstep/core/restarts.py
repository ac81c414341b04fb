"""Restarts: what follows when a rank ends or a signal arrives.

Comes in: what happened and when. Goes out: at most one action with its reason. Never waits, never asks. One life of the ranks
is what lies between two `RanksStarted`.

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


@dataclass(frozen=True, slots=True)
class Exit:
    """`code` as subprocess tells it: 0 ended well, n exit code, -n killed by signal n. `message`: from the rank's error file."""

    rank: int
    code: int
    message: str = ""

    def __str__(self) -> str:
        if self.code == 0:
            return f"rank {self.rank} ended well"
        if self.code > 0:
            return f"rank {self.rank} exited with code {self.code}" + (f" ({self.message})" if self.message else "")
        return f"rank {self.rank} was killed by {signal_words(-self.code)}"


# -- what happens


@dataclass(frozen=True, slots=True)
class RanksStarted:
    at_ns: int


@dataclass(frozen=True, slots=True)
class RanksExited:
    """Exits noticed together. `completed_step` is the newest step any rank has told of, None when none ever did."""

    exits: tuple[Exit, ...]
    at_ns: int
    completed_step: int | None = None


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


Event = RanksStarted | RanksExited | RanksUndead | SignalReceived | TimeUp


# -- what to do


@dataclass(frozen=True, slots=True)
class RestartAll:
    why: str


@dataclass(frozen=True, slots=True)
class SignalRanks:
    signum: int
    why: str
    within_ns: int


@dataclass(frozen=True, slots=True)
class End:
    """Kill what is left, give the keeper `within_ns` to clean up, leave with `exit_code`. `cause`: the failure that was too much."""

    ok: bool
    exit_code: int
    why: str
    within_ns: int = END_WITHIN_NS
    cause: Exit | None = None


Action = RestartAll | SignalRanks | End


class _Stage(Enum):
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


@dataclass
class Restarts:
    world_size: int
    max_restarts: int
    has_store: bool
    restarts: int = 0
    _stage: _Stage = _Stage.RUNNING
    _running: set[int] = field(default_factory=set)
    _started_ns: int = 0
    _failed: bool = False
    _best_step: int = -1
    _crashes: int = 0
    _signal: str = ""
    _signum: int = 0
    _end_within_ns: int = END_WITHIN_NS

    def handle(self, event: Event) -> Action | None:
        """The one thing that follows from `event`; None when there is nothing to do but wait."""
        if self._stage is _Stage.OVER:
            return None
        if isinstance(event, RanksStarted):
            self._running, self._started_ns, self._failed = set(range(self.world_size)), event.at_ns, False
            return None
        if isinstance(event, RanksExited):
            return self._exited(event)
        if isinstance(event, SignalReceived):
            return self._signalled(event)
        if isinstance(event, RanksUndead):
            stuck = " and ".join(str(r) for r in event.ranks)
            return self._end(1, f"gave up: rank {stuck} hangs in the kernel, did not die of SIGKILL, and may write again when it wakes up")
        if self._stage is _Stage.STOPPING and isinstance(event, TimeUp):
            late = f"{len(self._running)} ranks did not leave within {STOP_WITHIN_NS / S_NS:.0f} s"
            return self._end(128 + self._signum, f"{self._signal}; {late}")
        return None

    def _exited(self, event: RanksExited) -> Action | None:
        self._running -= {e.rank for e in event.exits}
        failures = [e for e in event.exits if e.code]
        self._failed = self._failed or bool(failures)
        if self._stage is _Stage.RUNNING and failures:
            # A kill explains the other ranks' errors; their errors never explain a kill.
            return self._failure(min(failures, key=lambda e: (e.code > 0, e.rank)), event)
        if self._running:
            return None  # ranks seldom end in the same moment
        if self._stage is _Stage.STOPPING:
            return self._end(128 + self._signum, self._signal)
        took = _seconds(event.at_ns - self._started_ns)
        return self._end(0, f"all {self.world_size} ranks ended well {took} after their start; {self.restarts} restarts")

    def _failure(self, cause: Exit, event: RanksExited) -> Action:
        life_ns = event.at_ns - self._started_ns
        sentence = f"{cause} {_seconds(life_ns)} after start"
        self._count_crash(cause, life_ns, event.completed_step)
        if self._crashes >= SAME_CRASHES:
            why = f"the program failed {self._crashes} times in a row without a new step, a restart will not help"
            return self._end(1, f"gave up: {sentence}; {why}", cause=cause)
        if self.restarts >= self.max_restarts:
            return self._end(1, f"gave up: {sentence}; all {self.max_restarts} restarts are used up", cause=cause)
        self.restarts += 1
        count = f"restart {self.restarts} of {self.max_restarts}"
        return RestartAll(f"{sentence}; restarting all {self.world_size} ranks from memory ({count})")

    def _count_crash(self, cause: Exit, life_ns: int, completed_step: int | None) -> None:
        """A program that fails again and again at the same place is wrong, and restarting it hides that."""
        advanced = life_ns > EARLY_NS if completed_step is None else completed_step > self._best_step
        self._best_step = max(self._best_step, -1 if completed_step is None else completed_step)
        if advanced:
            self._crashes = 0
        if cause.code > 0 or -cause.code in FAULTS:
            self._crashes += 1

    def _signalled(self, event: SignalReceived) -> Action | None:
        name = signal_words(event.signum)
        if self._stage is not _Stage.RUNNING:
            if event.signum == SIGHUP:  # a closing terminal sends it twice
                return None
            return self._end(128 + event.signum, f"{self._signal}; then {name}: leaving at once", within_ns=0)
        self._signum = event.signum
        preempted = event.signum in (SIGTERM, SIGHUP)
        self._signal = f"{'preempted' if preempted else 'interrupted'} by {name} {_seconds(event.at_ns - self._started_ns)} after start"
        if not preempted:
            return self._stop(event.signum, "stopping all ranks")
        # The state outlives the ranks: they stop first, and the keeper then writes the newest step there will ever be.
        if self.has_store:
            self._end_within_ns = PERSIST_WITHIN_NS
            return self._stop(SIGTERM, "the newest step all ranks hold goes to the store")
        return self._stop(SIGTERM, "there is no store to save the newest step to")

    def _stop(self, signum: int, why: str) -> Action:
        self._stage = _Stage.STOPPING
        self._signal = f"{self._signal}: {why}"
        if not self._running:
            return self._end(128 + self._signum, self._signal)
        return SignalRanks(signum, f"{self._signal}; {signal_words(signum)} to {len(self._running)} ranks", STOP_WITHIN_NS)

    def _end(self, exit_code: int, why: str, within_ns: int | None = None, cause: Exit | None = None) -> End:
        self._stage = _Stage.OVER
        return End(exit_code == 0, exit_code, why, self._end_within_ns if within_ns is None else within_ns, cause)


def signal_words(signum: int) -> str:
    return f"{NAMES[signum]} ({signum})" if signum in NAMES else f"signal {signum}"


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / S_NS:.1f} s"
