"""Machine: one node of the cluster: its memory, its clocks, its processes, and the connections
between them.

A machine is never repaired: what takes its place is another one, with a number of its own. Clocks
of machines begin anywhere, run a little too fast or too slow, and the wall clock may jump.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from keepstep.model.events import Event
from keepstep.model.messages.keeper_rank import NotUnderstood
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Acts, MessageCodec
from keepstep.sim.protocol.memory import Files
from keepstep.sim.protocol.world import Process, World

T = TypeVar("T")

YEAR_2026_NS = 1_767_225_600 * S_NS
UID = 1000


class Machine:
    """`number` is its own for ever; which node of the job it is depends on the round."""

    def __init__(self, world: World, number: int, rack: str | None, budget_bytes: int) -> None:
        chance = world.stream(f"machine {number}")
        self.world, self.number, self.rack = world, number, rack
        self.host = f"10.0.{number // 256}.{number % 256}"
        self.files = Files(budget_bytes)
        self.alive = True
        self.processes: list[Process] = []
        self.events: list[Event] = []  # the journal
        self.clock = SimClock(
            world,
            chance.randrange(10**6) * S_NS,
            chance.randrange(-100, 100) * MS_NS,
            chance.randrange(-100, 100),
        )
        self.on_lost: list[Callable[[], None]] = []

    def start(self, name: str) -> Process:
        process = Process(self.world, self, f"{name}@{self.number}")
        self.processes.append(process)
        process.on_end.append(lambda: self.processes.remove(process))
        return process

    def lose(self, why: str) -> None:
        """Everything on it, at once."""
        self.alive = False
        for process in list(self.processes):
            process.end(why)
        for call in self.on_lost:
            call()


class SimClock:
    """`ports.Clock`. `ppm`: by how much it is too fast."""

    __slots__ = ("_booted_ns", "_ppm", "_world", "wall_error_ns")

    def __init__(self, world: World, booted_ns: int, wall_error_ns: int, ppm: int) -> None:
        self._world, self._booted_ns, self.wall_error_ns, self._ppm = (
            world,
            booted_ns,
            wall_error_ns,
            ppm,
        )

    def monotonic_ns(self) -> int:
        now_ns = self._world.now_ns
        return self._booted_ns + now_ns + now_ns * self._ppm // 1_000_000

    def takes_ns(self, delay_ns: int) -> int:
        """How much time has to pass in the world until this clock is later by `delay_ns`."""
        # two more: this is rounded down, and so is what the clock shows then
        return delay_ns * 1_000_000 // (1_000_000 + self._ppm) + 2

    def wall_ns(self) -> int:
        return YEAR_2026_NS + self._world.now_ns + self.wall_error_ns


class SimJournal:
    """`ports.Journal`: kept with the machine's number, whatever becomes of the machine."""

    def __init__(self, machine: Machine, who: str, heard: Callable[[Machine, Event], None]) -> None:
        self._machine, self._who, self._heard = machine, who, heard

    def record(self, kind: str, why: str, /, *_: Any, **data: Any) -> None:
        machine = self._machine
        event = Event(
            machine.clock.wall_ns(), machine.clock.monotonic_ns(), self._who, kind, why, data
        )
        machine.events.append(event)
        machine.world.note(f"{self._who}@{machine.number}", f"{kind}: {why}")
        self._heard(machine, event)


class SimExecutor:
    """`ports.Executor`: work is done a while after it was asked for, its result is heard a while
    later."""

    def __init__(self, process: Process, most_ns: int) -> None:
        self._process, self._most_ns = process, most_ns
        self._random = process.world.stream(f"workers {process.name}")

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        self._process.after(self._random.randrange(self._most_ns), self._work, work, then)

    def act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        self._process.after(self._random.randrange(self._most_ns), self._next_act, acts, then)

    def _next_act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        try:
            next(acts)
        except StopIteration as over:
            self._process.after(self._random.randrange(self._most_ns), then, over.value)
        else:
            self.act(acts, then)

    def _work(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        found = work()
        self._process.after(self._random.randrange(self._most_ns), then, found)


class Line:
    """One end of a connection within a machine: messages, in order. See `ports.Box`.

    `hear` is called with each; `gone` when the other end is; `on_refused` when something came that
    is no message. `checks`: whether each crosses as its bytes.
    """

    def __init__(self, process: Process, pid: int, codec: MessageCodec, checks: bool) -> None:
        self.process, self.pid, self._codec, self._checks = process, pid, codec, checks
        self.hear: Callable[[Any], None] = _nothing
        self.gone: Callable[[], None] = _gone
        self.on_refused: Callable[[str, str], None] = _untold
        self.is_open = True
        self._other: Line = self
        self._last_ns = 0

    def send(self, message: Any, /) -> bool:
        if not self._checks:
            return self._deliver(self._other._come, message)
        return self.send_packet(self._codec.encode(message))

    def send_packet(self, packet: bytes) -> bool:
        """As it is: it need not be a message."""
        return self._deliver(self._other._receive, packet)

    def _deliver(self, come: Callable[[Any], None], what: Any) -> bool:
        other, world = self._other, self.process.world
        if not self.is_open or not other.is_open or not other.process.alive:
            return False
        self._last_ns = max(self._last_ns, world.now_ns + MS_NS // 10)
        world.at(self._last_ns, other.process, come, what)
        return True

    def poke(self, message: Any, /) -> None:
        self.send(message)

    def _receive(self, packet: bytes) -> None:
        try:
            message = self._codec.decode(packet)
        except ValueError as error:
            if self.is_open:
                self.on_refused(f"process {self.pid}", str(error))
                self.send(NotUnderstood(str(error)))
            return
        self._come(message)

    def _come(self, message: Any) -> None:
        if self.is_open:
            self.hear(message)

    def close(self) -> None:
        """The other end hears that, behind all that was sent."""
        if not self.is_open:
            return
        self.is_open = False
        other, world = self._other, self.process.world
        world.at(max(self._last_ns, world.now_ns + MS_NS // 10), other.process, other._end)

    def _end(self) -> None:
        if self.is_open:
            self.is_open = False
            self.gone()


def connect(
    one: Process,
    one_pid: int,
    other: Process,
    other_pid: int,
    codecs: tuple[MessageCodec, MessageCodec],
    checks: bool = True,
) -> tuple[Line, Line]:
    """A connection between two processes of a machine: (the end of `one`, that of `other`).
    `codecs`: of their parts in the conversation."""
    here = Line(one, other_pid, codecs[0], checks)
    there = Line(other, one_pid, codecs[1], checks)
    here._other, there._other = there, here
    one.on_end.append(here.close)
    other.on_end.append(there.close)
    return here, there


def _nothing(message: Any) -> None:
    """Nobody listens yet."""


def _gone() -> None:
    """Nobody listens yet."""


def _untold(sender: str, why: str) -> None:
    """Nobody wants to know."""
