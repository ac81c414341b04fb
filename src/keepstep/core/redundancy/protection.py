"""Wards: which nodes keep a rank's snapshot safe, from the placement of nodes and the ranks that
live on them.

Comes in: a placement and a mesh. Goes out: one `Ward` a rank. Copies go rank by rank; codes run
over rows: the i-th ranks of all nodes of a group form one, so that losing a node takes one member
of each row. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.core.redundancy.placement import place
from keepstep.core.redundancy.stripes import Stripes, stripes_of_snapshots
from keepstep.errors import ConfigError
from keepstep.model.mesh import Mesh
from keepstep.model.topology import Copies, NoRedundancy, Scheme


@dataclass(frozen=True, slots=True)
class Ward:
    """One rank's protection: `holders` are the other nodes that must prove their part. `row`: the
    ranks it is coded with, itself among them; empty for copies."""

    rank: int
    node: int
    holders: tuple[int, ...]
    row: tuple[int, ...] = ()
    tolerates: int = 0

    def stripes(self, payload_bytes: Mapping[int, int]) -> Stripes:
        """How the row's payloads are combined; `payload_bytes` of each of its ranks."""
        return stripes_of_snapshots(
            self.row, self.tolerates, [payload_bytes[rank] for rank in self.row]
        )


def wards(policy: Scheme, mesh: Mesh) -> dict[int, Ward]:
    """Every rank's ward. Raises ConfigError when the nodes are too few, or a code meets nodes with
    unequal numbers of ranks."""
    if isinstance(policy, NoRedundancy) or len(mesh.members) == 1:
        return {rank: Ward(rank, node, ()) for rank, node in mesh.node_of.items()}
    counts = {m.ranks for m in mesh.members}
    if not isinstance(policy, Copies) and len(counts) > 1:
        raise ConfigError(
            f"{policy}: expected the same number of ranks on every node, found {sorted(counts)}"
        )
    found = {}
    for group in place(policy, mesh.topology).groups:
        for node in group.members:
            others = tuple(holder for holder in group.holders(node) if holder != node)
            for index, rank in enumerate(mesh.ranks_of(node)):
                row = (
                    ()
                    if isinstance(policy, Copies)
                    else tuple(mesh.ranks_of(member)[index] for member in group.members)
                )
                found[rank] = Ward(
                    rank, node, others, row, 0 if isinstance(policy, Copies) else group.tolerates
                )
    return dict(sorted(found.items()))
