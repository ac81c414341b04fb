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
from typing import TYPE_CHECKING, Any

from keepstep.errors import KeepstepError

if TYPE_CHECKING:
    from keepstep.sim.protocol.machine import Machine

TRACE_LINES = 400
MISTAKES = (
    *(
        KeepstepError,
        AssertionError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OSError,
        ArithmeticError,
        RuntimeError,
    ),
    *(BufferError, NameError),
)


class Killed(BaseException):
    """A simulated process ends in the middle of what it does. Not an `Exception`: nothing that runs
    in it may swallow this."""


ENDS = (Killed, *MISTAKES)


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
    """`fault_at`: the number of the port call (counted over all keepers) that fails, for loops over
    all of them."""

    def __init__(self, seed: int, fault_at: int | None = None, deadly: bool = True) -> None:
        self.seed, self.now_ns, self.events = seed, 0, 0
        self.trace = Trace()
        self.crashes: list[Crash] = []
        self.deaths: list[str] = []  # how keepers ended
        self.calls, self.fault_at, self.deadly = 0, fault_at, deadly
        self.stopped = False
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

    def run(self, until_ns: int) -> None:
        """Until then, or until somebody stops it."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns and not self.stopped:
            self.now_ns, _, whose, call, args = heappop(heap)
            self.events += 1
            if whose is None:
                call(*args)
            elif whose.alive:
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

    def _ended(self, whose: Process, error: BaseException) -> None:
        if isinstance(error, Killed):
            whose.end(str(error))
        else:
            self.crashes.append(Crash(whose.name, self.now_ns, error))
            whose.end(f"crashed: {type(error).__name__}: {error}")


class Process:
    """A process on a machine. `on_end` is called once, when it is over, by whatever cause: what the
    kernel does then."""

    def __init__(self, world: World, machine: Machine, name: str) -> None:
        self.world, self.machine, self.name = world, machine, name
        self.alive = True
        self.why_ended = ""
        self.on_end: list[Callable[[], None]] = []
        self.is_keeper = False
        self.dies_at_call = -1  # counted down by `touch`

    def after(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        self.world.after(delay_ns, self, call, *args)

    def touch(self, *what: str) -> bool:
        """A port is called. True: this call is the one that is to fail, in whatever way the port
        has."""
        world = self.world
        if not self.alive:
            raise Killed(f"a port was called after its end: {' '.join(what)}")
        if not self.is_keeper:
            return False
        world.calls += 1
        if world.calls == world.fault_at:
            world.note(self.name, f"fault at port call {world.calls}, {' '.join(what)}")
            if world.deadly:
                raise Killed(f"killed at {' '.join(what)}, port call {world.calls}")
            return True
        if self.dies_at_call > 0:
            self.dies_at_call -= 1
            if self.dies_at_call == 0:
                raise Killed(f"killed at {' '.join(what)}")
        return False

    def end(self, why: str) -> None:
        if not self.alive:
            return
        self.alive, self.why_ended = False, why
        self.world.note(self.name, f"ends: {why.splitlines()[0] if why else ''}")
        if self.is_keeper:
            self.world.deaths.append(why)
        ends, self.on_end = self.on_end, []
        for call in ends:
            call()
