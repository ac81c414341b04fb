"""Strangers: what they do to each other is nothing to the job."""

from __future__ import annotations

from random import Random

from keepstep.model.units import S_NS
from keepstep.sim.protocol.faults.strangers import NUMBER, Squatter
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.wire.pipe import Piece, SimSocket
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import World

ADDRESS = ("10.0.0.9", 20_001)
DIALS = 8


class Caller:
    """Who dials; writes down when what is said to it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.heard: list[tuple[int, bytes]] = []

    def begin(self, found: SimSocket | str) -> None:
        assert isinstance(found, SimSocket)
        found.user = self
        found.send([b"a hello that a squatter may say back"])

    def arrived(self, pieces: list[Piece]) -> None:
        self.heard.append((self._world.now_ns, b"".join(pieces)))

    def ended(self, why: str) -> None:
        raise AssertionError(why)


def _heard(by_strangers_too: bool) -> list[tuple[int, bytes]]:
    """By a keeper's machine from who has a lost machine's address."""
    job = SimJob(RunPlan(nodes=2), World(1))
    world, network = job.world, job.around.network
    network.take(ADDRESS, Squatter(job, Random(1)))
    keeper, caller = Machine(world, 0, None, 0).start("keeper"), Caller(world)
    stranger = Machine(world, NUMBER, None, 0).start("stranger")
    aside = network.aside(world.stream("strangers' wires"))
    for _ in range(DIALS):
        if by_strangers_too:
            aside.dial(stranger, ADDRESS, S_NS, Caller(world).begin)
        world.run(world.now_ns + S_NS)
        network.dial(keeper, ADDRESS, S_NS, caller.begin)
        world.run(world.now_ns + S_NS)
    return caller.heard


def test_what_a_squatter_says_to_a_keeper_does_not_hang_on_who_else_comes() -> None:
    """Strangers who had been turned out by a keeper came back when its machine was lost, and took
    the answers that the job would have got: the run was compared with another one."""
    alone = _heard(by_strangers_too=False)
    assert alone and _heard(by_strangers_too=True) == alone
