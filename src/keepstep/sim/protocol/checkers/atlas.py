"""Atlas: what the placement must survive at each moment, so that those who judge know what is owed.

Comes in: the leader's words, the meshes, which machines were lost and which snapshots damaged. Goes
out: the newest generation that was ever committed, for as long as everything that has happened
since is within what its placement promises; then nothing is owed until another one is committed.

A machine that nobody can reach is as good as lost, but only while it is so: what is owed then is
owed late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.core.redundancy.protection import Assignment, assignments
from keepstep.model.attempts import Verdict
from keepstep.model.mesh import Mesh
from keepstep.model.messages.peers import HorizonWord, MeshMessage
from keepstep.model.snapshot import Stamp
from keepstep.model.topology import Auto, Scheme, parse_policy
from keepstep.runtime.agent.meeting_record import CODEC
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.observer import Observer
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.wire.links import SimLinks
from keepstep.sim.protocol.world.machine import Machine


@dataclass(frozen=True)
class Generation:
    """One that was committed, and on which machines it was protected: by rank its assignment, by
    node its machine."""

    stamp: Stamp
    assignments: Mapping[int, Assignment]
    machines: tuple[int, ...]
    node_of: dict[int, int]


class Atlas(Observer):
    """Looks and knows; violates nothing. `committed`: the newest, until all go on from an older
    one. `damaged`: (machine, rank, stamp) of every own snapshot, copy or parity in which a bit was
    flipped. `are_all_done`: all have done their last step. `is_over`: so it is, or it was said so:
    nothing is owed any more."""

    def __init__(self, job: SimJob) -> None:
        self._job = job
        self.committed: Generation | None = None
        self.damages: set[tuple[int, int, Stamp]] = set()
        self._meshes: dict[int, tuple[Mesh, tuple[int, ...]]] = {}  # by version, with its machines
        self._policies: dict[int, Scheme] = {}  # by version, as the leader told
        self._told_in: dict[int, int] = {}  # by epoch, the mesh whose leader told of it
        self.nodes = job.plan.nodes  # of the newest mesh
        self.machines: tuple[int, ...] = ()  # likewise, by node
        self.world_size = job.world_size  # likewise
        self._epoch = -1  # that is trained
        self._trained_by: dict[int, Program] = {}  # by rank, in that epoch
        self._done: set[int] = set()  # likewise
        self.are_all_done = False
        self.is_over = False

    def written(self, key: str, value: str) -> None:
        if key.endswith("/verdict"):
            verdict: Verdict = CODEC.decode(value.encode())
            self.is_over |= verdict.outcome != "again"

    def formed(self, machine: Machine, mesh: Mesh) -> None:
        by_host = {node.machine.host: node.machine.number for node in self._job.nodes}
        machines = tuple(by_host[member.host] for member in mesh.members)
        self._meshes[mesh.version] = (mesh, machines)
        if mesh.version == max(self._meshes):  # a keeper that was away may hear of an older one
            self.nodes = len(mesh.members)
            self.machines = machines
            self.world_size = mesh.world_size

    def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        if not isinstance(message, HorizonWord):
            return
        policy = parse_policy(message.policy)
        if isinstance(policy, Auto):
            return
        self._policies[message.mesh_version] = policy
        self._told_in[message.epoch] = message.mesh_version
        stamp = message.committed
        if stamp is not None and (self.committed is None or stamp > self.committed.stamp):
            self.committed = self._generation(stamp, message.mesh_version)

    def would_be(self, stamp: Stamp, epoch: int) -> Generation | None:
        """That generation, if it were committed in that epoch; None before its policy is known. Who
        still trains an epoch acts on what was told in its mesh, though a newer one has formed."""
        version = self._told_in.get(epoch, max(self._meshes))
        return self._generation(stamp, version) if version in self._policies else None

    def _generation(self, stamp: Stamp, mesh_version: int) -> Generation:
        mesh, machines = self._meshes[mesh_version]
        return Generation(
            stamp=stamp,
            assignments=assignments(self._policies[mesh_version], mesh),
            machines=machines,
            node_of=dict(mesh.node_of),
        )

    def damaged(self, machine: Machine, rank: int, stamp: Stamp) -> None:
        self.damages.add((machine.number, rank, stamp))

    def has_damage(self, machine: int, stamp: Stamp) -> bool:
        """Whether a bit was flipped there in something of that generation."""
        return any((number, at) == (machine, stamp) for number, _, at in self.damages)

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        rank = program.who.rank
        # Where every machine was lost nobody remembers the epochs: they are counted anew.
        if epoch != self._epoch or self._trained_by.get(rank, program) is not program:
            self._epoch = epoch
            self._trained_by.clear()
            self._done.clear()
            self.are_all_done = False
        self._trained_by[rank] = program
        if self.committed is not None and (source != "memory" or stamp < self.committed.stamp):
            # Not before all who judge have heard of this: what was owed is compared with what all
            # go on from.
            self._job.world.after(1, None, self._forget, self.committed)

    def _forget(self, known: Generation) -> None:
        if self.committed is known:
            self.committed = None

    def done(self, program: Program) -> None:
        self._done.add(program.who.rank)
        self.are_all_done = len(self._done) == program.who.world_size
        self.is_over |= self.are_all_done

    @property
    def committed_ranks(self) -> int:
        """Of how many ranks the newest generation is: a job of another size goes back to a
        checkpoint."""
        return 0 if self.committed is None else len(self.committed.assignments)

    def owed(self) -> Stamp | None:
        """What all ranks must be able to go back to."""
        return None if self.is_over else self.surviving()

    def surviving(self) -> Stamp | None:
        """What was committed, where all of it is left; None before anything was, too."""
        known = self.committed
        if known is None or not all(self._survives(known, rank) for rank in known.assignments):
            return None
        return known.stamp

    def _survives(self, known: Generation, rank: int) -> bool:
        assignment = known.assignments[rank]
        if self._job.plan.slots != 1 and self._has(known, assignment.node, rank):
            return True  # the only slot of a rank may be overwritten at any moment
        if not assignment.stripe_group:
            return any(self._has(known, holder, rank) for holder in assignment.holders)
        lost = [r for r in assignment.stripe_group if not self._has(known, known.node_of[r], r)]
        return len(lost) <= assignment.tolerates

    def _has(self, known: Generation, node: int, rank: int) -> bool:
        number = known.machines[node]
        is_alive = self._job.nodes[number].machine.alive
        return is_alive and (number, rank, known.stamp) not in self.damages
