"""Network: which machine reaches which, how long that takes, and who listens where.

Comes in: what the nemesis does to paths and to what crosses them. Goes out: connections
(`pipe.py`), and what becomes of them. Paths have directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Protocol

from keepstep.core.wire.health import LinkTimeouts
from keepstep.errors import KeeperError
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.units import MIB, MS_NS, S_NS
from keepstep.sim.protocol.wire.light import LIGHT_WATCH_NS, light_timeouts, wire_format
from keepstep.sim.protocol.wire.pipe import Piece, Pipe, SimSocket
from keepstep.sim.protocol.world.world import Process, World

if TYPE_CHECKING:
    from keepstep.sim.protocol.wire.links import SimLinks

FIRST_PORT = 20_000
WATCH_NS = 100 * MS_NS
STUCK_NS = 500 * MS_NS
SYN_WAITS_NS = (1 * S_NS, 2 * S_NS, 2 * S_NS)  # Linux asks after 1 s and 3 s; 5 s are all we wait


@dataclass(frozen=True, slots=True)
class Wires:
    """How good they are. `flips`: the part of all pieces in which a bit flips. `halves`: the part
    of all blocks that arrives in two pieces, cut anywhere; of frames an eighth of it. `breaks`: the
    part of all that is sent which gets no further; a moment later its connection breaks.
    `bytes_per_s`: of blocks; frames are small, and take no time of it.

    `queue_bytes`: what may wait for one node before a block is refused. `checks`: whether messages
    cross as the bytes that keepers send. `light`: for large runs, see `light.py`. `knocks`: who
    connects knocks first, see `porch.py`.
    """

    latency_ns: int = MS_NS // 5
    jitter_ns: int = MS_NS
    bytes_per_s: int = 100 * MIB
    flips: float = 0.0
    halves: float = 0.2
    breaks: float = 0.0
    queue_bytes: int = 64 * MIB
    checks: bool = True
    # where it was measured: one of these after the other
    measured_bytes_per_s: tuple[int, ...] = ()
    holds_ns: int = 0  # each for so long
    # a dial that nobody answers takes as long as TCP tries; else it fails at once
    dials_wait: bool = False
    light: bool = False
    knocks: bool = False


class Listener(Protocol):
    """A process that listens."""

    process: Process

    def accept(self, socket: SimSocket) -> None:
        """Somebody has connected. Called in the process."""


class Network:
    """All paths between all machines, by the machines' numbers."""

    def __init__(self, world: World, wires: Wires) -> None:
        self.world = world
        self.wires = wires
        self.random = world.stream("network")
        self.format = wire_format(wires.checks and not wires.light, not wires.light)
        self.timeouts = light_timeouts if wires.light else LinkTimeouts.within
        self.watch_ns = LIGHT_WATCH_NS if wires.light else WATCH_NS
        self.doors: dict[tuple[str, int], Listener] = {}
        self.connections: dict[Pipe, None] = {}  # in the order in which they were made
        # None: nobody wants to know
        self.on_send: Callable[[SimLinks, int, MeshMessage], None] | None = None
        self.on_link: Callable[[SimLinks, int], None] = lambda links, node: None
        self.on_hear: Callable[[SimLinks, int, MeshMessage], None] | None = None
        # Somebody talks to a keeper from now on, who has knocked right where that is asked for.
        self.on_let_in: Callable[[SimSocket], None] = lambda socket: None
        # Who read the wire: by which end it is sent, and what.
        self.taps: list[Callable[[SimSocket, Sequence[Piece]], None]] = []
        # What arrives within so long of something else arrives with it: one event for many pieces.
        self.step_ns = wires.latency_ns // 4
        self.is_faulty = False  # some path does not carry, or does not flow
        self.may_harm = False  # something happens to pieces on their way
        self._flips = 0.0
        self._bytes_per_s = wires.bytes_per_s
        self._holds_until_ns = 0
        self._taken: set[tuple[str, int]] = set()
        self._hosts: dict[str, int] = {}  # by host its machine
        self._next_port = FIRST_PORT
        self._blocked: dict[tuple[int, int], int] = {}  # how often
        self._stalled: dict[tuple[int, int], int] = {}
        self._gone: set[int] = set()
        self._unplugged: set[str] = set()  # hosts whose interface carries nothing
        self._busy_ns: dict[tuple[str, str], int] = {}  # until when blocks take that road
        self.flips = wires.flips
        self.breaks = wires.breaks

    def aside(self, chance: Random) -> Network:
        """Other wires to the same doors, which nobody else uses: nothing happens to them, and what
        crosses them changes nothing that is drawn for anybody else."""
        wires = copy(self)
        wires.random = chance
        wires.connections = {}
        wires._busy_ns = {}
        wires.is_faulty = wires.may_harm = False
        wires.breaks = 0.0
        wires.taps = []
        return wires

    # -- who listens where

    def reserve(self, process: Process, address: tuple[str, int]) -> tuple[str, int]:
        """Raises KeeperError when it is not this host's, or taken."""
        host = address[0]
        if host not in process.machine.hosts or address in self._taken:
            raise KeeperError(
                f"host: expected an address of this machine with port {address[1]} free, "
                f"found {address[0]}"
            )
        if address[1] == 0:
            self._next_port += 1
            address = (host, self._next_port)
        self._taken.add(address)
        self._hosts[host] = process.machine.number
        return address

    def release(self, address: tuple[str, int]) -> None:
        self._taken.discard(address)
        self.doors.pop(address, None)

    def take(self, address: tuple[str, int], door: Listener) -> None:
        """Somebody has the address of a machine that is no more, and listens there."""
        self._hosts[address[0]] = door.process.machine.number
        self.doors[address] = door

    def dial(
        self,
        process: Process,
        address: tuple[str, int],
        unacked_ns: int,
        then: Callable[[SimSocket | str], None],
        source: str | None = None,
    ) -> None:
        """`then` hears, in that process, of a connection, or why there is none. `source`: the host
        it is dialled from; the machine's first unless given."""
        hosts = (source or process.machine.host, address[0])
        self._ask(process, hosts, address, unacked_ns, then, 0)

    def _ask(
        self,
        process: Process,
        hosts: tuple[str, str],
        address: tuple[str, int],
        unacked_ns: int,
        then: Callable[[SimSocket | str], None],
        times: int,
    ) -> None:
        here, there = process.machine.number, self._hosts.get(address[0])
        where = f"cannot reach {address[0]}:{address[1]}"
        carries = there is None or (self.carries(here, there) and self.carries(there, here))
        if carries and self.is_plugged(hosts):
            self.world.after(
                self.latency_ns(), None, self._knock, process, hosts, address, unacked_ns, then
            )
        elif not self.wires.dials_wait:
            self.world.after(self.latency_ns(), process, then, f"{where}: No route to host")
        elif times == len(SYN_WAITS_NS):
            then(f"{where}: timed out")
        else:
            again_ns = SYN_WAITS_NS[times]
            self.world.after(
                again_ns, process, self._ask, process, hosts, address, unacked_ns, then, times + 1
            )

    def _knock(
        self,
        process: Process,
        hosts: tuple[str, str],
        address: tuple[str, int],
        unacked_ns: int,
        then: Callable[[SimSocket | str], None],
    ) -> None:
        door = self.doors.get(address)
        if door is None or not door.process.alive or not process.alive:
            why = f"cannot reach {address[0]}:{address[1]}: Connection refused"
            self.world.after(self.latency_ns(), process, then, why)
            return
        near, far = (SimSocket(self, p, unacked_ns) for p in (process, door.process))
        Pipe(self, near, far, hosts)
        self.world.after(0, door.process, door.accept, far)
        self.world.after(self.latency_ns(), process, then, near)

    # -- paths

    def carries(self, source: int, target: int) -> bool:
        """Whether packets get there. When they do not, kernels give up in the end."""
        if not self._blocked and not self._gone:
            return True
        return (
            (source, target) not in self._blocked
            and source not in self._gone
            and target not in self._gone
        )

    def flows(self, source: int, target: int) -> bool:
        """Whether bytes get to the program there."""
        return self.carries(source, target) and (source, target) not in self._stalled

    def is_plugged(self, hosts: tuple[str, str]) -> bool:
        """Whether the interfaces at both ends carry anything."""
        return self._unplugged.isdisjoint(hosts)

    def unplug(self, host: str) -> None:
        """That interface carries nothing, until it is plugged in again; the machine's others do."""
        self._unplugged.add(host)
        self._update()
        for pipe in self.connections:
            if host in pipe.hosts:
                pipe.suspect()

    def plug_in(self, host: str) -> None:
        self._unplugged.discard(host)
        self._update()
        for pipe in self.connections:
            pipe.carries_again()

    def take_road(self, road: tuple[str, str], now_ns: int, nbytes: int) -> int:
        """Until when so many bytes take the road from one host to another: one after the other, on
        whichever connection."""
        ends_ns = max(now_ns, self._busy_ns.get(road, 0)) + self.transfer_ns(nbytes)
        self._busy_ns[road] = ends_ns
        return ends_ns

    def latency_ns(self) -> int:
        wires = self.wires
        return wires.latency_ns + int(wires.jitter_ns * self.random.random() ** 4)

    def transfer_ns(self, nbytes: int) -> int:
        if self.wires.measured_bytes_per_s and self.world.now_ns >= self._holds_until_ns:
            self._bytes_per_s = self.random.choice(self.wires.measured_bytes_per_s)
            self._holds_until_ns = self.world.now_ns + self.wires.holds_ns
        return nbytes * S_NS // self._bytes_per_s

    def block(self, paths: Iterable[tuple[int, int]]) -> None:
        """These carry nothing until they are unblocked as often."""
        for path in paths:
            self._blocked[path] = self._blocked.get(path, 0) + 1
            for pipe in self._through(path):
                pipe.suspect()
        self._update()

    def unblock(self, paths: Iterable[tuple[int, int]]) -> None:
        for path in paths:
            _release(self._blocked, path)
        self._update()
        for pipe in self.connections:
            pipe.carries_again()

    def stall(self, path: tuple[int, int]) -> None:
        """Bytes get no further there, although kernels hear of each other, until it is released as
        often."""
        self._stalled[path] = self._stalled.get(path, 0) + 1
        self._update()

    def unstall(self, path: tuple[int, int]) -> None:
        _release(self._stalled, path)
        self._update()
        for pipe in self._through(path):
            pipe.carries_again()

    def lose(self, machine: int) -> None:
        """It answers no more, for ever: nothing is said to anybody about it."""
        self._gone.add(machine)
        self._update()
        for pipe in list(self.connections):
            if machine in pipe.paths[0]:
                pipe.suspect()
                for end in pipe.ends:
                    if end.machine == machine:
                        end.vanish()

    def _through(self, path: tuple[int, int]) -> list[Pipe]:
        return [pipe for pipe in self.connections if path in pipe.paths]

    def _update(self) -> None:
        self.is_faulty = bool(self._blocked or self._stalled or self._gone or self._unplugged)

    # -- what happens to pieces

    @property
    def flips(self) -> float:
        """The part of all pieces in which a bit flips."""
        return self._flips

    @flips.setter
    def flips(self, flips: float) -> None:
        self._flips = flips
        self.may_harm = bool(flips or self.wires.halves)

    def harm(self, piece: Piece) -> Piece:
        if not self._flips or self.random.random() >= self._flips or not len(piece):
            return piece
        harmed = bytearray(piece)
        harmed[self.random.randrange(len(harmed))] ^= 1 << self.random.randrange(8)
        return bytes(harmed)

    def sent(self, target: SimSocket) -> None:
        """Something is on its way there."""
        if self.random.random() < self.breaks:
            target.is_stuck = True
            self.world.after(self.random.randrange(STUCK_NS), None, target.pipe.cut, "reset")

    def cut_at(self, piece: Piece) -> int:
        """How much of it comes before the rest; 0: all comes at once."""
        halves = self.wires.halves if type(piece) is memoryview else self.wires.halves / 8
        if not halves or len(piece) < 2 or self.random.random() >= halves:
            return 0
        return self.random.randrange(1, len(piece))


def _release(counts: dict[tuple[int, int], int], path: tuple[int, int]) -> None:
    counts[path] -= 1
    if not counts[path]:
        del counts[path]
