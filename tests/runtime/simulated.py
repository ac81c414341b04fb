"""Real keepers in virtual time, one a machine, for tests of their parts: on simulated memory, links
and journals, and without ranks or agents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.config import resolve
from keepstep.model.events import Event
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.keeper_rank import (
    BeginMesh,
    CountTraffic,
    Listen,
    Listening,
    TrafficCounted,
)
from keepstep.model.units import GIB, MS_NS, S_NS
from keepstep.ports import Box, Hearer, Links, Receiver
from keepstep.runtime.keeper.run import LOCK, KeeperRun
from keepstep.runtime.keeper_world import KeeperWorld as Surroundings
from keepstep.sim.protocol.job.nodes import PageLock
from keepstep.sim.protocol.job.persisters import open_store
from keepstep.sim.protocol.wire.links import SimLinks
from keepstep.sim.protocol.wire.network import Network, Wires
from keepstep.sim.protocol.world.executor import SimExecutor
from keepstep.sim.protocol.world.filesystem import SharedDisk
from keepstep.sim.protocol.world.machine import UID, Machine, SimJournal
from keepstep.sim.protocol.world.memory import SimMemory
from keepstep.sim.protocol.world.timers import SimTimers
from keepstep.sim.protocol.world.world import Crash, World

SECRET = "a secret of the tests"
PATIENCE_NS = 600 * S_NS
BLOCK_BYTES = 512  # small snapshots have several all the same


class FakeBox:
    """A process of the node, as its keeper sees it: keeps what it is sent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.heard: list[Any] = []
        self.is_open = True

    def send(self, message: Any, /) -> bool:
        self.heard.append(message)
        return True

    def poke(self, message: Any, /) -> None:
        self.heard.append(message)

    def hear_rest(self) -> None:
        pass

    def release(self) -> None:
        pass

    def close(self) -> None:
        self.is_open = False

    def last(self, kind: type[Any]) -> Any:
        """The newest message of that kind; None when there was none."""
        return next((m for m in reversed(self.heard) if isinstance(m, kind)), None)


class Doorless:
    """Nobody connects here but by `SimKeeper.hear`."""

    def close(self) -> None:
        pass


class NoPersisters:
    """Persisters that live and never answer. See `ports.Persisters`."""

    def start(self, hearer: Hearer) -> Box:
        return FakeBox(3)


class AsideWork(SimExecutor):
    """`hangs`: what is submitted from now on never comes back."""

    hangs = False

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        if not self.hangs:
            super().submit(work, then)


class Town:
    """Machines with a keeper each, and the network between them."""

    def __init__(self, wires: Wires | None = None) -> None:
        self.world = World(1)
        self.network = Network(self.world, wires or Wires())
        self.disk = SharedDisk(self.world.stream("disk"))
        self.crashes: list[Crash] = []
        self.world.on_crash = self.crashes.append
        self.keepers: list[SimKeeper] = []

    def keeper(self, **config: Any) -> SimKeeper:
        """One more machine."""
        machine = Machine(self.world, len(self.keepers), None, 1 * GIB, BLOCK_BYTES)
        self.keepers.append(SimKeeper(self, machine, config))
        return self.keepers[-1]

    def pass_time(self, ns: int = S_NS) -> None:
        self.world.run(self.world.now_ns + ns)
        for crash in self.crashes:
            raise crash.error

    def until(self, holds: Callable[[], bool]) -> None:
        until_ns = self.world.now_ns + PATIENCE_NS
        while not holds():
            assert self.world.now_ns < until_ns, "it does not come about"
            self.pass_time(MS_NS)

    def begin_mesh(self, version: int, ranks: int = 1) -> None:
        """All machines, in their order, are the nodes of a mesh."""
        members = tuple(keeper.member(node, ranks) for node, keeper in enumerate(self.keepers))
        for node, keeper in enumerate(self.keepers):
            keeper.hear(keeper.agent, BeginMesh(Mesh(version, node, members, SECRET)))
        self.pass_time()


class SimKeeper:
    """One life of a machine's keeper."""

    def __init__(self, town: Town, machine: Machine, config: dict[str, Any]) -> None:
        self.town, self.machine, self.process = town, machine, machine.start("keeper")
        self.memory = SimMemory(machine.files, self.process)
        places = {"job": "j", "arena_dir": "/memory", "state_dir": "/state"}
        self.settings = resolve({**places, **config}, {"HOME": "/nowhere"}, "j")
        self.agent = FakeBox(1)
        self.aside = AsideWork(self.process, MS_NS)
        self._woken = False
        self.run = KeeperRun(
            self.settings,
            self._surroundings(),
            PageLock(self.memory, self.settings.job_dir / LOCK),
            self._over,
            turn_ns=MS_NS,
        )
        self.run.begin()
        assert self.run.keeper is not None
        self.keeper = self.run.keeper

    def _surroundings(self) -> Surroundings:
        town, machine, process = self.town, self.machine, self.process
        has_store = self.settings.store is not None
        return Surroundings(
            clock=machine.clock,
            timers=SimTimers(process),
            memory=self.memory,
            journal=SimJournal(machine, "keeper", lambda machine, event: None),
            workers=SimExecutor(process, MS_NS),
            aside=self.aside,
            serve_boxes=lambda path, hearer: Doorless(),
            open_links=self._open_links,
            wake=self._wake,
            checkpoints=open_store("/store", town.disk, process, "j") if has_store else None,
            persisters=NoPersisters() if has_store else None,
            pid=100 + machine.number,
            uid=UID,
        )

    def _open_links(
        self,
        job_hash: bytes,
        incarnation: int,
        address: tuple[str, int],
        dead_ns: int,
        receiver: Receiver,
    ) -> Links:
        network, process = self.town.network, self.process
        return SimLinks(network, process, job_hash, incarnation, address, dead_ns, receiver)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.process.after(MS_NS // 20, self._hear_peers)

    def _hear_peers(self) -> None:
        self._woken = False
        self.run.hear_peers()

    def _over(self) -> None:
        self.run.close()
        self.process.end("all is over")

    # -- what a test does to it

    def hear(self, box: FakeBox, message: Any) -> None:
        self.run.hear(box, message)

    def member(self, node: int, ranks: int) -> Member:
        """Where it listens, which it is asked to if it does not."""
        self.hear(self.agent, Listen(self.machine.host, 0))
        listening = self.agent.last(Listening)
        return Member(node, listening.host, listening.port, listening.incarnation, ranks)

    def answers(self) -> bool:
        """Whether it lives, and answers."""
        box = FakeBox(2)
        self.hear(box, CountTraffic())
        return self.process.alive and isinstance(box.last(TrafficCounted), TrafficCounted)

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.machine.events if event.kind == kind]
