"""Agreement: something that all nodes must have alike, and who has it otherwise.

Comes in: a value by node. Goes out: the values, most common first, and the nodes that stand out.
More than half of the nodes decide; without such a majority nobody can tell who is right, and all
are named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dissent:
    """`camps`: (value, its nodes), the largest first. `nodes`: who is at fault, or may be.
    `is_decided`: a majority says so."""

    camps: tuple[tuple[str, tuple[int, ...]], ...]
    nodes: tuple[int, ...]
    is_decided: bool


def dissent(by_node: Mapping[int, str]) -> Dissent | None:
    """Who differs; None: nobody."""
    nodes_of: dict[str, list[int]] = defaultdict(list)
    for node in sorted(by_node):
        nodes_of[by_node[node]].append(node)
    if len(nodes_of) < 2:
        return None
    camps = sorted(
        ((value, tuple(nodes)) for value, nodes in nodes_of.items()),
        key=lambda camp: (-len(camp[1]), camp[1]),
    )
    is_decided = 2 * len(camps[0][1]) > len(by_node)
    minority = camps[1:] if is_decided else camps
    return Dissent(
        tuple(camps), tuple(sorted(node for _, camp in minority for node in camp)), is_decided
    )
