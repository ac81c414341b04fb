"""Node safety: which nodes may be lost at this moment, in as few words as the leader can say it to
all of them.

Comes in: what may be lost (`core/redundancy/survival.py`), and who is linked. Goes out: a message,
and from this and the mesh, which every node knows, the whole again. Where all is well the message
is as long for ten nodes as for ten thousand: only exceptions are named, and neighbours together.

Invariant: what is abbreviated and spelled out is what was known; nothing is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from keepstep.core.redundancy.survival import Losable
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.peers import CriticalNode, NodeRange, SafetyWord
from keepstep.model.snapshot import Stamp


def abbreviate(
    mesh: Mesh,
    policy: str,
    policy_why: str,
    stamp: Stamp | None,
    is_committed: bool,
    losable: Losable,
    linked: Set[int],
) -> SafetyWord:
    """The leader's word about `stamp`; `linked`: the nodes that are linked with it, and itself."""
    alone = [node for node, owners in losable.critical.items() if owners == (node,)]
    shared = [
        CriticalNode(node, owners) for node, owners in losable.critical.items() if owners != (node,)
    ]
    return SafetyWord(
        mesh_version=mesh.version,
        policy=policy,
        policy_why=policy_why,
        step=-1 if stamp is None else stamp.step,
        is_committed=is_committed,
        apart=ranges(m.node for m in mesh.members if m.node not in linked),
        alone=ranges(alone),
        critical=tuple(shared),
        out_of_reach=ranges(losable.out_of_reach),
        any_nodes=losable.any_nodes,
        why=losable.why,
    )


def node_lines(word: SafetyWord, mesh: Mesh) -> list[dict[str, Any]]:
    """Who is who, and who is linked with the leader: what hardly ever changes of what is told."""
    apart = _nodes_in(word.apart, mesh)
    return [
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


def spell_out(
    word: SafetyWord,
    mesh: Mesh,
    before: Mapping[str, Any] | None = None,
    nodes: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """What the leader of this mesh knew when it said so: for people, and for who asks whether a
    node can be spared.

    `before` is what was known till now. Until something is committed again, as after a resume,
    those stay expendable that were. `nodes`: the lines of these nodes, where they are known.
    """
    apart = _nodes_in(word.apart, mesh)
    critical = {node: (node,) for node in _nodes_in(word.alone, mesh)} | dict(word.critical)
    safe = [m.node for m in mesh.members if m.node not in apart and m.node not in critical]
    return {
        "policy": word.policy,
        "policy_why": word.policy_why,
        "step": None if word.step < 0 else word.step,
        "is_committed": word.is_committed,
        "nodes": node_lines(word, mesh) if nodes is None else nodes,
        "safe": safe,
        "expendable": safe if word.is_committed else expendable(before, mesh.members),
        "critical": {str(node): list(critical[node]) for node in sorted(critical)},
        "out_of_reach": sorted(_nodes_in(word.out_of_reach, mesh)),
        "any_nodes": word.any_nodes,
        "why": word.why,
    }


def expendable(known: Mapping[str, Any] | None, members: Sequence[Member]) -> list[int]:
    """The nodes that were safe to lose when something was last committed, if that was said of these
    very keepers: with another one the node may have gone that held it. What is committed stays on
    all its holders until something newer is."""
    if known is None:
        return []
    lives = [node.get("incarnation") for node in known["nodes"]]
    if lives != [m.incarnation for m in members]:
        return []
    found: list[int] = known["expendable"]
    return found


def ranges(nodes: Iterable[int]) -> tuple[NodeRange, ...]:
    """Neighbours as one range."""
    found: list[NodeRange] = []
    for node in sorted(nodes):
        if found and found[-1].last == node - 1:
            found[-1] = NodeRange(found[-1].first, node)
        else:
            found.append(NodeRange(node, node))
    return tuple(found)


def _nodes_in(told: Iterable[NodeRange], mesh: Mesh) -> set[int]:
    nodes = len(mesh.members)
    return {node for first, last in told for node in range(first, min(last + 1, nodes))}
