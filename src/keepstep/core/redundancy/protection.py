"""Protection: which nodes keep a rank's snapshot safe, from the placement of nodes and the ranks
that live on them.

Comes in: a policy and a mesh. Goes out: one `Assignment` a rank. Copies go rank by rank; codes run
over stripe groups: the i-th ranks of all nodes of a placement group form one, so that losing a node
takes one member of each. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from keepstep.core.redundancy.placement import place
from keepstep.core.redundancy.stripes import Stripes, stripes_of_snapshots
from keepstep.errors import ConfigError
from keepstep.model.mesh import Member, Mesh
from keepstep.model.topology import Copies, NoRedundancy, Scheme


@dataclass(frozen=True, slots=True)
class Assignment:
    """One rank's protection: `holders` are the other nodes that must prove their part.
    `stripe_group`: the ranks it is coded with, itself among them; empty for copies."""

    rank: int
    node: int
    holders: tuple[int, ...]
    stripe_group: tuple[int, ...] = ()
    tolerates: int = 0

    def stripes(self, kept_bytes: Mapping[int, int], checked_bytes: int) -> Stripes:
        """How the group's payloads are combined; `kept_bytes`: what of them is in each rank's own
        slot; `checked_bytes`: how many of these share a checksum."""
        sizes = [kept_bytes[rank] for rank in self.stripe_group]
        return stripes_of_snapshots(self.stripe_group, self.tolerates, sizes, checked_bytes)


def assignments(policy: Scheme, mesh: Mesh) -> Mapping[int, Assignment]:
    """Every rank's assignment, by rank. Raises ConfigError when the nodes are too few, or a code
    meets nodes with unequal numbers of ranks."""
    return _assignments(policy, mesh.members)


@lru_cache(maxsize=4)  # of a large job it takes a while, and each mesh asks for it more than once
def _assignments(policy: Scheme, members: tuple[Member, ...]) -> Mapping[int, Assignment]:
    mesh = Mesh(version=0, node=0, members=members, secret="")
    if isinstance(policy, NoRedundancy) or len(mesh.members) == 1:
        return {rank: Assignment(rank, node, ()) for rank, node in mesh.node_of.items()}
    is_coded = not isinstance(policy, Copies)
    counts = {m.ranks for m in mesh.members}
    if is_coded and len(counts) > 1:
        raise ConfigError(
            f"{policy}: expected the same number of ranks on every node, found {sorted(counts)}"
        )
    found = {}
    for group in place(policy, mesh.topology).groups:
        for node in group.members:
            others = tuple(holder for holder in group.holders(node) if holder != node)
            for index, rank in enumerate(mesh.ranks_of(node)):
                if is_coded:
                    coded_with = tuple(mesh.ranks_of(member)[index] for member in group.members)
                    found[rank] = Assignment(rank, node, others, coded_with, group.tolerates)
                else:
                    found[rank] = Assignment(rank, node, others)
    return dict(sorted(found.items()))


def partners(of: Mapping[int, Assignment], node: int) -> set[int]:
    """The nodes that hold something of `node`'s ranks, or for whose ranks it holds something."""
    near: set[int] = set()
    for assignment in of.values():
        parties = (*assignment.holders, assignment.node)
        if node in parties:
            near.update(parties)
    return near - {node}
