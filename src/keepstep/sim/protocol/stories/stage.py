"""StoryStage: what a story knows of the run that it is told in: who is where, and what has
happened.

Comes in: what observers are told, and port calls. Goes out: the machine or the rank that a story
means, and each thing that happened, to the rules that wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.errors import KeepstepError
from keepstep.model.events import Event
from keepstep.model.mesh import Mesh
from keepstep.model.messages.peers import HorizonWord, MeshMessage
from keepstep.model.snapshot import Phase, Stamp
from keepstep.sim.protocol.faults.acts import Acts
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.nodes import SimNode
from keepstep.sim.protocol.job.observer import Observer
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.wire.links import SimLinks
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import Process


@dataclass(frozen=True)
class Happened:
    """`kind`: the observer's word for it, or `calls` for a port call. `whose`: a rank's number, a
    machine's, or a key. `data`: what it was."""

    kind: str
    whose: object
    data: Any = None


@dataclass(frozen=True)
class SeenResumption:
    """All ranks went on from there."""

    epoch: int
    source: str
    step: int


class StoryStage(Observer):
    """Of one run. `on_happened` hears everything; `resumptions`: in their order."""

    def __init__(self, job: SimJob) -> None:
        self.job = job
        self.acts = Acts(job)
        self.on_happened: Callable[[Happened], None] = _nobody
        self.resumptions: list[SeenResumption] = []
        self.committed: Stamp | None = None
        self.done_ranks: set[int] = set()
        self._machine_of: dict[int, int] = {}  # by node, in the newest mesh
        job.world.on_call = self._called

    # -- whom a story means

    def machine_number(self, place: str) -> int:
        """Of `machine 1`, or of `node 1` of the newest mesh."""
        word, number = place.split()
        if word == "machine":
            return int(number)
        found = self._machine_of.get(int(number))
        if found is None:
            raise KeepstepError(f"there has been no {place} yet")
        return found

    def node(self, place: str) -> SimNode:
        """Whose machine lives."""
        number = self.machine_number(place)
        nodes = self.job.nodes
        if number >= len(nodes) or not nodes[number].machine.alive:
            raise KeepstepError(f"{place} is not there")
        return nodes[number]

    def process(self, role: str, place: str) -> Process:
        """The living keeper or agent there."""
        node = self.node(place)
        life = node.keeper if role == "keeper" else node.agent
        if life is None or not life.process.alive:
            raise KeepstepError(f"there is no living {role} on {place}")
        return life.process

    def program(self, rank: int) -> Program:
        """The living one."""
        for program in self.job.around.programs.values():
            if program.who.rank == rank and program.process.alive:
                return program
        raise KeepstepError(f"there is no living rank {rank}")

    def machine_of_rank(self, rank: int) -> Machine:
        return self.program(rank).process.machine

    @property
    def events(self) -> list[tuple[int, Event]]:
        """All that is in journals, with its machine's number."""
        return [(node.machine.number, e) for node in self.job.nodes for e in node.machine.events]

    # -- what happens

    def _tell(self, kind: str, whose: object, data: Any = None) -> None:
        self.on_happened(Happened(kind, whose, data))

    def _called(self, process: Process, what: str) -> None:
        self._tell("calls", process, what)

    def joined(self, program: Program) -> None:
        self._tell("joined", program.who.rank)

    def loaded(self, program: Program, source: str, stamp: Stamp) -> None:
        self._tell("loaded", program.who.rank, stamp.step)

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        if not self.resumptions or self.resumptions[-1].epoch < epoch:
            self.done_ranks.clear()
            self.resumptions.append(SeenResumption(epoch, source, stamp.step))
        self._tell("went", program.who.rank, stamp.step)

    def announced(self, program: Program, phase: Phase, step: int) -> None:
        self._tell("announced", program.who.rank, phase.name.lower())

    def stepped(self, program: Program, step: int) -> None:
        self._tell("stepped", program.who.rank, step)

    def sealed(self, program: Program, stamp: Stamp) -> None:
        self._tell("sealed", program.who.rank, stamp.step)

    def done(self, program: Program) -> None:
        self.done_ranks.add(program.who.rank)
        self._tell("done", program.who.rank)
        if len(self.done_ranks) == program.who.world_size:
            self._tell("all done", None)

    def agent_came(self, machine: Machine) -> None:
        self._tell("agent came", machine.number)

    def formed(self, machine: Machine, mesh: Mesh) -> None:
        self._machine_of[mesh.node] = machine.number

    def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        if isinstance(message, HorizonWord) and message.committed is not None:
            self.committed = max(message.committed, self.committed or message.committed)
        self._tell("said", message.KIND, message)

    def written(self, key: str, value: str) -> None:
        self._tell("written", key)

    def recorded(self, machine: Machine, event: Event) -> None:
        self._tell("recorded", machine.number, event)


def _nobody(happened: Happened) -> None:
    """Nobody wants to know."""
