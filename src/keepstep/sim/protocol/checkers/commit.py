"""A commit is true: when the leader says for the first time that a stamp is committed, every rank
has it sealed, and every holder of every rank has proven its part.

Looked for in the bytes that lie on the machines. Not verified: machines that are gone at that
instant; anything after damage.
"""

from __future__ import annotations

from keepstep.model.messages.peers import HorizonWord, MeshMessage
from keepstep.model.restore_sources import HeldSnapshot, Inventory
from keepstep.sim.protocol.checkers.atlas import Generation
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.checkers.inspection import Inspection
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.wire.links import SimLinks


class CommitsAreTrue(Checker):
    NAME = "a commit is true"
    _known: Generation | None = None

    def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        if not isinstance(message, HorizonWord) or message.committed is None:
            return
        known = self.atlas.committed
        is_new = known is not None and known is not self._known
        self._known = known
        if is_new and known is not None and not self.atlas.damages and not self.atlas.is_over:
            self._look(known)

    def _look(self, known: Generation) -> None:
        unproven = unproven_part(self.job, known)
        if unproven is not None:
            told = f"{known.stamp} of epoch {known.stamp.epoch} is said to be committed"
            self.violated(f"{told}, and {unproven}")


def unproven_part(job: SimJob, known: Generation) -> str | None:
    """Which node has not proven its part of that generation, in words; None when all that live
    have."""
    there = {
        node: Inspection(job, machine).inventory()
        for node, number in enumerate(known.machines)
        if (machine := job.nodes[number].machine).alive
    }
    # from the only slot of a rank it may be gone the moment after
    keeps_own = job.plan.slots != 1
    for rank, assignment in known.assignments.items():
        for node in (*([assignment.node] if keeps_own else []), *assignment.holders):
            if node in there and not _has_part(known, rank, node, there[node]):
                return f"node {node} has not proven its part of rank {rank}"
    return None


def _has_part(known: Generation, rank: int, node: int, there: Inventory) -> bool:
    assignment = known.assignments[rank]
    if node == assignment.node or not assignment.stripe_group:
        return HeldSnapshot(rank, known.stamp) in there.snapshots
    return any(
        parity.stamp == known.stamp and parity.stripe_group == assignment.stripe_group
        for parity in there.parities
    )
