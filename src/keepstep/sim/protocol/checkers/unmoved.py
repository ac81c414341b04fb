"""Unmoved: no word of a stranger changes anything.

A run with strangers (`faults/strangers.py`) is compared with the same one without them, as it was
written down by a `RunWitness`: at the same instants the same ranks do the same, keepers say and
hear the same, the same stands in journals, and in the end the same bytes are in the store.

Not verified: what is said to a person who asks (counts of refused connections); how much of a
processor it costs.
"""

from __future__ import annotations

from zlib import crc32

from keepstep.model.events import Event
from keepstep.model.mesh import Mesh
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.snapshot import Phase, Stamp
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.observer import Observer
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.wire.links import SimLinks
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import Process


class RunWitness(Observer):
    """`seen`: when what was seen, in its order."""

    def __init__(self, job: SimJob) -> None:
        self.job = job
        self.seen: list[tuple[int, str]] = []

    def see(self, *what: object) -> None:
        self.seen.append((self.job.world.now_ns, " ".join(map(str, what))))

    def joined(self, program: Program) -> None:
        self.see("joined", program.process.name)

    def loaded(self, program: Program, source: str, stamp: Stamp) -> None:
        self.see("loaded", program.process.name, source, stamp)

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        self.see("went", program.process.name, source, stamp, epoch)

    def announced(self, program: Program, phase: Phase, step: int) -> None:
        self.see("announced", program.process.name, phase, step)

    def stepped(self, program: Program, step: int) -> None:
        self.see("stepped", program.process.name, step, crc32(program.state))

    def done(self, program: Program) -> None:
        self.see("done", program.process.name)

    def sealed(self, program: Program, stamp: Stamp) -> None:
        self.see("sealed", program.process.name, stamp)

    def formed(self, machine: Machine, mesh: Mesh) -> None:
        self.see("formed", machine.number, mesh.version)

    def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        self.see("said", links.machine, node, message.KIND)

    def linked(self, links: SimLinks, node: int) -> None:
        self.see("linked", links.machine, node)

    def heard(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        self.see("heard", links.machine, node, message.KIND)

    def written(self, key: str, value: str) -> None:
        self.see("written", key, value)

    def recorded(self, machine: Machine, event: Event) -> None:
        self.see("recorded", machine.number, event.kind, event.why)

    def agent_ended(self, machine: Machine, exit_code: int) -> None:
        self.see("agent ended", machine.number, exit_code)

    def removed(self, process: Process, path: str) -> None:
        self.see("removed", process.name, path)

    def over(self) -> None:
        files = self.job.around.disk.files
        for path in sorted(files):
            self.see("stored", path, crc32(files[path].data))


class StrangersChangeNothing(RunWitness):
    """Compares with what was seen without them."""

    NAME = "strangers change nothing"

    def __init__(self, job: SimJob, without: RunWitness) -> None:
        super().__init__(job)
        self._without = without.seen

    def see(self, *what: object) -> None:
        place = len(self.seen)
        super().see(*what)
        expected = self._without[place] if place < len(self._without) else "nothing more"
        if self.seen[place] != expected and not self.job.violations:
            self.job.violate(self.NAME, f"without them {expected}, with them {self.seen[place]}")

    def over(self) -> None:
        super().over()
        missing = self._without[len(self.seen) :]
        if missing and not self.job.violations:
            self.job.violate(self.NAME, f"without them {missing[0]}, with them nothing more")
