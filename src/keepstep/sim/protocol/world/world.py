"""World: virtual time, and the processes that live in it.

Comes in: calls to be made at an instant, each for a process or for the world itself. Goes out: the
same calls, in the order of their instants (and of their asking, where instants are equal), as long
as the process lives. There is no other clock, no thread and no other source of chance than the
seed, so that a seed is a run: `Trace` sums it up in one number.

A process ends between two calls, or within one, at a call of a port (`Process.touch`): what it had
written by then stays written. Code of ours that raises where nothing failed ends its process too,
and is remembered as a crash.
"""

from __future__ import annotations

import traceback
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn

from keepstep.errors import KeepstepError
from keepstep.model.units import S_NS

if TYPE_CHECKING:
    from keepstep.sim.protocol.world.machine import Machine

TRACE_LINES = 400
YEAR_2026_NS = 1_767_225_600 * S_NS
CALL_NS = 1_000_000  # of processor time that a call takes, as others see it


class Killed(BaseException):
    """A simulated process ends in the middle of what it does. Not an `Exception`: nothing that runs
    in it may swallow this."""


ENDS = (
    Killed,
    KeepstepError,
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OSError,
    ArithmeticError,
    RuntimeError,
    BufferError,
    NameError,
)


@dataclass(frozen=True, slots=True)
class Crash:
    """A process of ours that ended by its own mistake."""

    name: str
    at_ns: int
    error: BaseException

    def __str__(self) -> str:
        place = "".join(traceback.format_exception(self.error)[-6:])
        return (
            f"{self.name} at {self.at_ns / 1e9:.6f} s: {type(self.error).__name__}: "
            f"{self.error}\n{place}"
        )


class Trace:
    """What happened: a digest of all of it, and the last lines of it."""

    def __init__(self, lines: int = TRACE_LINES) -> None:
        self.digest = 0
        self.lines: deque[str] = deque(maxlen=lines)

    def note(self, now_ns: int, who: str, what: str) -> None:
        line = f"{now_ns / 1e9:12.6f} {who:<14} {what}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.lines.append(line)


class World:
    """`fault`: the port call that fails, for loops over all of them. `began_wall_ns`: what time it
    was when it began, as people see it."""

    def __init__(self, seed: int, fault: PortFault | None = None) -> None:
        self.seed = seed
        self.now_ns = 0
        self.began_wall_ns = YEAR_2026_NS
        self.events = 0
        self.trace = Trace()
        self.on_crash: Callable[[Crash], None] = _nobody
        # Hears of every port call before it is made, in the process that makes it.
        self.on_call: Callable[[Process, str], None] | None = None
        self.stopped = False
        self._fault = fault
        self._calls: dict[str, PortCalls] = {}
        self._heap: list[tuple[int, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def stream(self, name: str) -> Random:
        """Chance for one purpose, so that more of it here changes nothing there."""
        return Random(f"{self.seed}/{name}")

    def at(self, at_ns: int, whose: Process | None, call: Callable[..., None], *args: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (at_ns, self._sequence, whose, call, args))

    def after(
        self, delay_ns: int, whose: Process | None, call: Callable[..., None], *args: Any
    ) -> None:
        self._sequence += 1
        heappush(self._heap, (self.now_ns + delay_ns, self._sequence, whose, call, args))

    def note(self, who: str, what: str) -> None:
        self.trace.note(self.now_ns, who, what)

    def stop(self) -> None:
        """No further call is made."""
        self.stopped = True

    @property
    def next_ns(self) -> int | None:
        """When something is to happen; None: nothing is."""
        return self._heap[0][0] if self._heap else None

    def run(self, until_ns: int) -> None:
        """Until then, or until somebody stops it."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns and not self.stopped:
            self.now_ns, _, whose, call, args = heappop(heap)
            self.events += 1
            if whose is None:
                call(*args)
            elif whose.is_stopped:
                whose.postpone(call, args)
            elif whose.alive:
                whose.cpu_ns += CALL_NS
                try:
                    call(*args)
                except ENDS as error:
                    self._ended(whose, error)
        if not self.stopped:
            self.now_ns = until_ns

    def carry_out(self, whose: Process, call: Callable[..., None], *args: Any) -> None:
        """Within that process, which may end by it."""
        try:
            call(*args)
        except ENDS as error:
            self._ended(whose, error)

    def calls_of(self, role: str) -> PortCalls:
        """The port calls of all processes with this role."""
        calls = self._calls.get(role)
        if calls is None:
            fault = self._fault
            is_faulty = fault is not None and fault.role == role
            calls = self._calls[role] = PortCalls(fault.call if fault and is_faulty else 0)
        return calls

    @property
    def calls(self) -> dict[str, int]:
        """How many calls of ports there were, by the role of the process that made them."""
        return {role: calls.count for role, calls in self._calls.items() if calls.count}

    @property
    def is_fault_deadly(self) -> bool:
        return self._fault is not None and self._fault.is_deadly

    def _ended(self, whose: Process, error: BaseException) -> None:
        if isinstance(error, Killed):
            whose.end(str(error))
        else:
            self.on_crash(Crash(whose.name, self.now_ns, error))
            whose.end(f"crashed: {type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class PortFault:
    """The `call`-th port call of all processes with this role, counted from 1: it fails, or its
    process is killed there."""

    role: str
    call: int
    is_deadly: bool = True


class PortCalls:
    """Of all processes with one role. `fails_at`: the number of the one that fails; 0: none."""

    __slots__ = ("count", "fails_at")

    def __init__(self, fails_at: int) -> None:
        self.count = 0
        self.fails_at = fails_at


class Process:
    """A process on a machine. `role`: what it is, without a number: `rank`, `agent`, `keeper`.
    `on_end` is called once, when it is over, by whatever cause: what the kernel does then."""

    def __init__(
        self,
        world: World,
        machine: Machine,
        role: str,
        pid: int,
        number: str = "",
        parent_pid: int = 0,
    ) -> None:
        self.world = world
        self.machine = machine
        self.role = role
        self.pid = pid
        self.parent_pid = parent_pid
        self.name = f"{role}{number}@{machine.number}"
        self.alive = True
        self.why_ended = ""
        self.on_end: list[Callable[[], None]] = []
        self.dies_at_call = 0  # counted down by `touch`
        self._is_dying = False
        self._calls = world.calls_of(role)
        self._spent_ns = 0
        self.is_stopped = False
        self.cpu_ns = 0
        self._postponed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def after(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        world = self.world  # as `World.after` has it: most of what happens is asked for here
        world._sequence += 1
        heappush(world._heap, (world.now_ns + delay_ns, world._sequence, self, call, args))

    def touch(self, *what: str) -> bool:
        """A port is called. True: this call is the one that is to fail, in whatever way the port
        has."""
        world = self.world
        if world.on_call is not None:
            world.on_call(self, " ".join(what))
        if self._is_dying or not self.alive:
            raise Killed(f"a port was called after its end: {' '.join(what)}")
        calls = self._calls
        calls.count += 1
        if calls.count == calls.fails_at:
            world.note(self.name, f"a port call fails: {' '.join(what)}")
            if world.is_fault_deadly:
                self._die(*what)
            return True
        if self.dies_at_call:
            self.dies_at_call -= 1
            if not self.dies_at_call:
                self._die(*what)
        return False

    def _die(self, *what: str) -> NoReturn:
        """What it calls while it unwinds has no effect any more."""
        self._is_dying = True
        raise Killed(f"killed at {' '.join(what)}")

    def spend(self, duration_ns: int) -> None:
        """What it is doing takes so long: its executor goes on that much later."""
        self._spent_ns += duration_ns

    def spent_ns(self) -> int:
        """How long that was since this was asked last."""
        spent_ns, self._spent_ns = self._spent_ns, 0
        return spent_ns

    # -- SIGSTOP and SIGCONT

    def stop(self) -> None:
        """Nothing is done in it any more, until it continues."""
        if self.alive and not self.is_stopped:
            self.is_stopped = True
            self.world.note(self.name, "is stopped")

    def cont(self) -> None:
        """What was to be done meanwhile is done now, in its order."""
        if not self.is_stopped:
            return
        self.is_stopped = False
        postponed, self._postponed = self._postponed, []
        for call, args in postponed:
            self.world.after(0, self, call, *args)

    def postpone(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Until it continues."""
        self._postponed.append((call, args))

    def end(self, why: str) -> None:
        if not self.alive:
            return
        self.alive = False
        self.is_stopped = False
        self._postponed.clear()
        self.why_ended = why
        self.world.note(self.name, f"ends: {why.splitlines()[0] if why else ''}")
        ends, self.on_end = self.on_end, []
        for call in ends:
            call()


def _nobody(crash: Crash) -> None:
    """Nobody wants to know."""
