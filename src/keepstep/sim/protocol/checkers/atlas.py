"""Atlas: what the placement must survive at each moment, so that those who judge know what is owed.

Comes in: the leader's words, the rounds' meshes, which machines were lost and which snapshots
damaged. Goes out: the newest generation that was ever committed, for as long as everything that has
happened since is within what its placement promises; then nothing is owed until another one is
committed.

A machine that nobody can reach is as good as lost, but only while it is so: what is owed then is
owed late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepstep.core.redundancy.protection import Assignment, assignments
from keepstep.model.mesh import Mesh
from keepstep.model.messages.peers import HorizonWord, MeshMessage
from keepstep.model.rounds import verdict_from_text
from keepstep.model.snapshot import Stamp
from keepstep.model.topology import Auto, parse_policy
from keepstep.sim.protocol.wire.links import SimLinks
from keepstep.sim.protocol.trainer import Rank
from keepstep.sim.protocol.job.observer import Checker

if TYPE_CHECKING:
    from keepstep.sim.protocol.job.job import Job


@dataclass(frozen=True)
class Committed:
    """A generation, and on which machines it was protected: by rank its assignment, by node its
    machine."""

    stamp: Stamp
    assignments: dict[int, Assignment]
    machines: tuple[int, ...]
    node_of: dict[int, int]


class Atlas(Checker):
    """Looks and knows; violates nothing itself."""

    name = "atlas"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.committed: Committed | None = None
        # (machine, rank, stamp): a bit was flipped in own snapshot, copy or parity
        self.damaged: set[tuple[int, int, Stamp]] = set()
        self._mesh: Mesh | None = None
        self._machines: tuple[int, ...] = ()
        self._done: set[int] = set()
        # all have done their last step, or it was said so: nothing is owed any more
        self.is_over = False

    def written(self, key: str, value: str) -> None:
        self.is_over |= key.endswith("/verdict") and verdict_from_text(value).kind != "again"

    def formed(self, agent: object, number: int, mesh: Mesh) -> None:
        by_host = {site.machine.host: site.machine.number for site in self.job.sites}
        self._mesh, self._machines = mesh, tuple(by_host[m.host] for m in mesh.members)

    def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        if not isinstance(message, HorizonWord) or message.committed is None:
            return
        stamp = message.committed
        policy = parse_policy(message.policy)
        mesh = self._mesh
        if mesh is None or isinstance(policy, Auto) or message.mesh_version != mesh.version:
            return
        if self.committed is None or stamp > self.committed.stamp:
            self.committed = Committed(
                stamp, assignments(policy, mesh), self._machines, dict(mesh.node_of)
            )

    def went(self, rank: Rank, source: str, stamp: Stamp, epoch: int) -> None:
        self._done.clear()
        if self.committed is not None and (source != "memory" or stamp < self.committed.stamp):
            # Not before all who judge have heard of this: what was owed is compared with what all
            # go on from.
            self.job.world.after(1, None, self._forget, self.committed)

    def _forget(self, known: Committed) -> None:
        if self.committed is known:
            self.committed = None

    def done(self, rank: Rank) -> None:
        self._done.add(rank.rank)
        self.is_over |= len(self._done) == self.job.world_size

    def owed(self) -> Stamp | None:
        """What all ranks must be able to go back to."""
        known = self.committed
        if known is None or self.is_over:
            return None
        return (
            known.stamp if all(self._survives(known, rank) for rank in known.assignments) else None
        )

    def _survives(self, known: Committed, rank: int) -> bool:
        assignment = known.assignments[rank]
        if self._has(known, assignment.node, rank):
            return True
        if not assignment.stripe_group:
            return any(self._has(known, holder, rank) for holder in assignment.holders)
        lost = [r for r in assignment.stripe_group if not self._has(known, known.node_of[r], r)]
        return len(lost) <= assignment.tolerates

    def _has(self, known: Committed, node: int, rank: int) -> bool:
        number = known.machines[node]
        return (
            self.job.sites[number].machine.alive and (number, rank, known.stamp) not in self.damaged
        )
