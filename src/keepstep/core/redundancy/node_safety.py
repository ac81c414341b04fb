"""Standing: which nodes may be lost at this moment, in as few words as the leader can say it to all
of them.

Comes in: what may be lost (`core/redundancy/survival.py`), and who is linked. Goes out: the fields
of its message, and from these and the mesh, which every node knows, the whole story again. Where
all is well they are as long for ten nodes as for ten thousand: only exceptions are named, and
neighbours in one word.

Invariant: what is said and completed is what was known; nothing is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from keepstep.core.redundancy.survival import Losable
from keepstep.model.mesh import Member, Mesh

Ranges = tuple[tuple[int, int], ...]  # (first, last)


def said(losable: Losable, alive: Set[int], nodes: int) -> dict[str, Any]:
    """As fields. `alone`: nodes with which their own snapshots would go, and nobody else's."""
    alone = [node for node, owners in losable.critical.items() if owners == (node,)]
    return {
        "apart": ranges(node for node in range(nodes) if node not in alive),
        "alone": ranges(alone),
        "critical": tuple(
            (node, owners) for node, owners in losable.critical.items() if owners != (node,)
        ),
        "out_of_reach": ranges(losable.out_of_reach),
        "any_nodes": losable.any_nodes,
        "losable": losable.why,
    }


def completed(
    fields: Mapping[str, Any], mesh: Mesh, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the leader of this mesh knew when it said so: for people, and for who asks whether a
    node can be spared.

    `before` is what was known till now. Until something is committed again, as after a resume,
    those stay expendable that were.
    """
    apart = _members(fields["apart"], mesh)
    critical = {node: (node,) for node in _members(fields["alone"], mesh)} | dict(
        fields["critical"]
    )
    nodes = [
        {
            "node": m.node,
            "host": m.host,
            "incarnation": m.incarnation,
            "rack": m.rack,
            "ranks": m.ranks,
            "linked": m.node not in apart,
        }
        for m in mesh.members
    ]
    safe = [m.node for m in mesh.members if m.node not in apart and m.node not in critical]
    return {
        **{"policy": fields["policy"], "policy_why": fields["policy_why"]},
        **{
            "step": None if fields["step"] < 0 else fields["step"],
            "is_committed": bool(fields["is_committed"]),
        },
        "nodes": nodes,
        "safe": safe,
        "expendable": safe if fields["is_committed"] else expendable(before, mesh.members),
        "critical": {str(node): list(critical[node]) for node in sorted(critical)},
        "out_of_reach": sorted(_members(fields["out_of_reach"], mesh)),
        "any_nodes": fields["any_nodes"],
        "why": fields["losable"],
    }


def expendable(standing: Mapping[str, Any] | None, members: Sequence[Member]) -> list[int]:
    """The nodes that were safe to lose when something was last committed, if that was told of these
    very keepers: with another one the node may have gone that held it. What is committed stays on
    all its holders until something newer is."""
    if standing is None or [n.get("incarnation") for n in standing["nodes"]] != [
        m.incarnation for m in members
    ]:
        return []
    found: list[int] = standing["expendable"]
    return found


def ranges(numbers: Iterable[int]) -> Ranges:
    """Those in a row as one."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return tuple(found)


def _members(told: Ranges, mesh: Mesh) -> set[int]:
    return {node for first, last in told for node in range(first, min(last + 1, len(mesh.members)))}
