"""Network: which machine reaches which, how long that takes, and who listens where.

Comes in: what the nemesis does to paths. Goes out: to the links (`links.py`) how long something
takes, and when a path fails or is back. Paths have directions. What is on its way into a path that
does not carry is not lost but late: TCP repeats it, unless the connection is given up first
(`links.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepstep.errors import KeeperError
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.units import MIB, MS_NS, S_NS
from keepstep.sim.protocol.world.world import World

if TYPE_CHECKING:
    from keepstep.sim.protocol.links import Connection, SimLinks

FIRST_PORT = 20_000


@dataclass(frozen=True, slots=True)
class Wires:
    """How good they are. `flips`: the part of all blocks that arrives damaged. `halves`: the part
    that is written in two acts.

    `queue_bytes`: what may wait for one node before a block is refused. `checks`: whether every
    message crosses as its bytes.
    """

    latency_ns: int = MS_NS // 5
    jitter_ns: int = MS_NS
    bytes_per_s: int = 100 * MIB
    flips: float = 0.0
    halves: float = 0.2
    queue_bytes: int = 64 * MIB
    checks: bool = True
    # where it was measured: one of these after the other
    measured_bytes_per_s: tuple[int, ...] = ()
    holds_ns: int = 0  # each for so long
    # one that nobody answers takes as long as TCP tries, and misses that the path is back
    dials_wait: bool = False


class Network:
    """All paths between all machines, by the machines' numbers."""

    def __init__(self, world: World, wires: Wires) -> None:
        self.world, self.wires = world, wires
        self.doors: dict[tuple[str, int], SimLinks] = {}
        self.connections: list[Connection] = []
        self.flips = wires.flips
        self._bytes_per_s, self._holds_until_ns = wires.bytes_per_s, 0
        self._taken: set[tuple[str, int]] = set()
        self._next_port, self._next_link = FIRST_PORT, 0
        self._blocked: dict[tuple[int, int], int] = {}  # how often
        self._gone: set[int] = set()
        self.random = world.stream("network")
        self.on_send: Callable[[SimLinks, int, MeshMessage], None] = _nobody

    def reserve(self, host: str, address: tuple[str, int]) -> tuple[str, int]:
        """Raises KeeperError when it is not this host's, or taken."""
        if address[0] != host or address in self._taken:
            raise KeeperError(
                f"host: expected an address of this machine with port {address[1]} free, "
                f"found {address[0]}"
            )
        if address[1] == 0:
            self._next_port += 1
            address = (host, self._next_port)
        self._taken.add(address)
        return address

    def release(self, address: tuple[str, int]) -> None:
        self._taken.discard(address)
        self.doors.pop(address, None)

    def next_link(self) -> int:
        self._next_link += 1
        return self._next_link

    # -- paths

    def carries(self, source: int, target: int) -> bool:
        if not self._blocked and not self._gone:
            return True
        return (
            (source, target) not in self._blocked
            and source not in self._gone
            and target not in self._gone
        )

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
            for connection in self.connections:
                if path in connection.paths:
                    connection.suspect()

    def unblock(self, paths: Iterable[tuple[int, int]]) -> None:
        for path in paths:
            self._blocked[path] -= 1
            if not self._blocked[path]:
                del self._blocked[path]
        for connection in list(self.connections):
            connection.carries_again()

    def lose(self, machine: int) -> None:
        """It answers no more, for ever: nothing is said to anybody about it."""
        self._gone.add(machine)
        for connection in self.connections:
            if machine in connection.paths[0]:
                connection.suspect()


def _nobody(links: SimLinks, node: int, message: MeshMessage) -> None:
    """Nobody wants to know."""
