"""Machine: one node of the cluster: its memory, its clocks, its journal, its processes.

A machine is never repaired: what takes its place is another one, with a number of its own. Clocks
of machines begin anywhere, run a little too fast or too slow, and the wall clock may jump.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.model.events import INFO, Event
from keepstep.model.units import MIB, MS_NS, S_NS
from keepstep.sim.protocol.world.memory import MachineFiles
from keepstep.sim.protocol.world.world import Process, World

UID = 1000
FIRST_PID = 1000


class Machine:
    """`number` is its own for ever; which node of the job it is depends on the attempt. `hosts`:
    its addresses, one for each of its network interfaces."""

    def __init__(
        self,
        world: World,
        number: int,
        rack: str | None,
        budget_bytes: int,
        block_bytes: int = 4 * MIB,
        interfaces: int = 1,
    ) -> None:
        chance = world.stream(f"machine {number}")
        self.world = world
        self.number = number
        self.rack = rack
        self.hosts = tuple(
            f"10.{each}.{number // 256}.{number % 256}" for each in range(interfaces)
        )
        self.host = self.hosts[0]
        self.files = MachineFiles(budget_bytes, block_bytes, world.stream(f"memory {number}"))
        self.alive = True
        self.processes: dict[int, Process] = {}  # the living ones, by pid
        self.events: list[Event] = []  # the journal
        self.clock = SimClock(
            world,
            booted_ns=chance.randrange(10**6) * S_NS,
            wall_error_ns=chance.randrange(-100, 100) * MS_NS,
            ppm=chance.randrange(-100, 100),
        )
        self.on_lost: list[Callable[[], None]] = []
        self._next_pid = FIRST_PID

    def start(self, role: str, number: str = "", parent_pid: int = 0) -> Process:
        """`number`: of the process among those of its role, for people."""
        pid = self._next_pid
        self._next_pid += 1
        process = Process(self.world, self, role, pid, number, parent_pid)
        self.processes[pid] = process
        process.on_end.append(lambda: self._ended(pid))
        return process

    def _ended(self, pid: int) -> None:
        del self.processes[pid]

    def lose(self, why: str) -> None:
        """Everything on it, at once."""
        self.alive = False
        for process in list(self.processes.values()):
            process.end(why)
        for call in self.on_lost:
            call()


class SimClock:
    """`ports.Clock`. `ppm`: by how much it is too fast."""

    __slots__ = ("_booted_ns", "_ppm", "_world", "wall_error_ns")

    def __init__(self, world: World, booted_ns: int, wall_error_ns: int, ppm: int) -> None:
        self._world = world
        self._booted_ns = booted_ns
        self.wall_error_ns = wall_error_ns
        self._ppm = ppm

    def monotonic_ns(self) -> int:
        now_ns = self._world.now_ns
        return self._booted_ns + now_ns + now_ns * self._ppm // 1_000_000

    def takes_ns(self, delay_ns: int) -> int:
        """How much time has to pass in the world until this clock is later by `delay_ns`."""
        # two more: this is rounded down, and so is what the clock shows then
        return delay_ns * 1_000_000 // (1_000_000 + self._ppm) + 2

    def boot(self) -> str:
        """Nobody knows: machines are told apart by how far their two clocks are apart."""
        return ""

    def wall_ns(self) -> int:
        return self._world.began_wall_ns + self._world.now_ns + self.wall_error_ns


class SimJournal:
    """`ports.Journal`: kept with the machine's number, whatever becomes of the machine."""

    def __init__(self, machine: Machine, who: str, heard: Callable[[Machine, Event], None]) -> None:
        self._machine = machine
        self._who = who
        self._heard = heard

    def record(self, kind: str, why: str, /, level: int = INFO, **data: Any) -> None:
        machine = self._machine
        event = Event(
            machine.clock.wall_ns(), machine.clock.monotonic_ns(), self._who, kind, why, data
        )
        machine.events.append(event)
        machine.world.note(f"{self._who}@{machine.number}", f"{kind}: {why}")
        self._heard(machine, event)
