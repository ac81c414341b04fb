"""The ports of the simulated world, as the contracts want them: time passes when somebody waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.core.wire.conversations import KEEPER_WITH_NODE, RANK_WITH_KEEPER
from keepstep.core.wire.streams import StreamLimits
from keepstep.model.units import GIB, MS_NS, S_NS
from keepstep.ports import Box, Clock, Executor, Links, Memory, Receiver
from keepstep.sim.protocol.wire.links import SimLinks
from keepstep.sim.protocol.wire.network import Network, Wires
from keepstep.sim.protocol.wire.pipe import Piece, Pipe, SimSocket
from keepstep.sim.protocol.world.boxes import LocalSockets
from keepstep.sim.protocol.world.executor import SimExecutor
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.memory import SimMemory
from keepstep.sim.protocol.world.world import Crash, World

PATIENCE_NS = 600 * S_NS
HERE = "127.0.0.1"
SOCKET = Path("/memory/job/keeper.sock")


class Time:
    """A world, and who waits in it."""

    def __init__(self) -> None:
        self.world = World(1)
        self.crashes: list[Crash] = []
        self.world.on_crash = self.crashes.append

    def until(self, holds: Callable[[], bool]) -> None:
        until_ns = self.world.now_ns + PATIENCE_NS
        while not holds():
            assert self.world.now_ns < until_ns, "it does not come about"
            self.world.run(self.world.now_ns + MS_NS)
            for crash in self.crashes:
                raise crash.error

    def machine(self, number: int, interfaces: int = 1) -> Machine:
        return Machine(self.world, number, None, 8 * GIB, interfaces=interfaces)


def memory() -> Memory:
    machine = Time().machine(0)
    return SimMemory(machine.files, machine.start("reader"))


def clock() -> tuple[Clock, Callable[[int], object]]:
    time = Time()

    def let_pass(ns: int) -> None:
        time.world.run(time.world.now_ns + ns + ns // 100)  # the clock may be slow

    return time.machine(0).clock, let_pass


class SimLoop(Time):
    def __init__(self) -> None:
        super().__init__()
        self.workers: Executor = SimExecutor(self.machine(0).start("loop"), MS_NS)

    def close(self) -> None:
        pass


class Ear:
    """Writes down what it hears."""

    def __init__(self, heard: list[Any]) -> None:
        self._heard = heard

    def hear(self, box: Box, message: Any, /) -> None:
        self._heard.append(message)

    def gone(self, box: Box, /) -> None:
        self._heard.append("gone")


class SimBoxes(Time):
    """A rank and its keeper on one machine."""

    def __init__(self) -> None:
        super().__init__()
        machine = self.machine(0)
        sockets = LocalSockets(machine)
        self.by_rank: list[Any] = []
        self.by_keeper: list[Any] = []
        self.refused: list[str] = []
        taken: list[Box] = []

        def take(box: Box) -> Ear:
            taken.append(box)
            return Ear(self.by_keeper)

        def refuse(kind: str, why: str) -> None:
            self.refused.append(why)

        sockets.listen(machine.start("keeper"), SOCKET, KEEPER_WITH_NODE, take, refuse)
        rank = machine.start("rank")
        self._rank = sockets.connect(
            rank, SOCKET, RANK_WITH_KEEPER, Ear(self.by_rank), lambda kind, why: None
        )
        self.until(lambda: bool(taken))
        self.rank: Box = self._rank
        self.keeper: Box = taken[0]

    def inject(self, packet: bytes) -> None:
        self._rank.send_packet(packet)

    def settle(self) -> None:
        self.world.run(self.world.now_ns + S_NS)

    def close(self) -> None:
        pass


class Stranger:
    """Somebody who says something and listens until the other side hangs up."""

    def __init__(self, says: bytes) -> None:
        self._says = says
        self.is_over = False

    def connected(self, found: SimSocket | str) -> None:
        assert isinstance(found, SimSocket), found
        found.user = self
        found.send((self._says,))

    def arrived(self, pieces: list[Piece]) -> None:
        pass

    def ended(self, why: str) -> None:
        self.is_over = True


class SimTown(Time):
    """Each keeper on a machine of its own."""

    def __init__(self, dead_ns: int, job: bytes, secret: bytes) -> None:
        super().__init__()
        self._dead_ns, self._job, self._secret = dead_ns, job, secret
        self._network = Network(self.world, Wires(halves=0.5))
        self._machines = 0

    def open(
        self,
        node: int,
        receiver: Receiver,
        incarnation: int = 1,
        host: str = HERE,
        streams: int = 1,
        interfaces: int = 1,
    ) -> Links:
        self._machines += 1
        machine = self.machine(self._machines, interfaces)
        if host == HERE:
            host = machine.host
        process = machine.start("keeper")
        links = SimLinks(
            self._network,
            process,
            self._job,
            incarnation,
            (host, 0),
            self._dead_ns,
            receiver,
            streams=StreamLimits.of(streams),
        )
        self.tell_again(node, links)
        return links

    def connections(self, links: Links) -> list[int]:
        assert isinstance(links, SimLinks)
        hosts = [pipe.hosts[1] for pipe in self._pipes_to(links)]
        return [hosts.count(host) for host, _ in links.addresses]

    def unplug(self, links: Links) -> None:
        assert isinstance(links, SimLinks)
        self._network.unplug(links.addresses[-1][0])

    def tell_again(self, node: int, links: Links) -> None:
        links.be(node, self._secret)

    def address(self, links: Links) -> tuple[str, int]:
        return links.address

    def _pipes_to(self, links: Links) -> list[Pipe]:
        assert isinstance(links, SimLinks)
        return [p for p in self._network.connections if p.ends[1].process is links.process]

    def shake(self, links: Links) -> None:
        for pipe in self._pipes_to(links):
            pipe.cut("shaken")

    def tear(self, links: Links) -> None:
        self.world.after(MS_NS // 5, None, self.shake, links)  # so long a piece is on its way

    def halve(self, links: Links) -> None:
        for pipe in self._pipes_to(links):
            pipe.ends[0].break_off("halved")

    def stall(self, links: Links) -> None:
        for path in self._paths_to(links):
            self._network.stall(path)

    def resume(self, links: Links) -> None:
        for path in self._paths_to(links):
            self._network.unstall(path)

    def _paths_to(self, links: Links) -> list[tuple[int, int]]:
        assert isinstance(links, SimLinks)
        return [(other, links.machine) for other in range(1, 20)]

    def stranger(self, links: Links, says: bytes) -> None:
        self._machines += 1
        process = self.machine(self._machines).start("stranger")
        stranger = Stranger(says)
        self._network.dial(process, links.address, S_NS, stranger.connected)
        self.until(lambda: stranger.is_over)

    def strand(self, links: Links) -> None:
        assert isinstance(links, SimLinks)
        self._network.block(
            (a, b)
            for other in range(1, 20)
            for a, b in ((other, links.machine), (links.machine, other))
        )
        self.shake(links)

    def close(self) -> None:
        pass
