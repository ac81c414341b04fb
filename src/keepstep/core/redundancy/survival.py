"""Survival: how likely memory survives k lost nodes, exactly, and which nodes can be lost right
now.

Comes in: groups (who protects whom) and, for the second question, what has been proven. Goes out:
counts, probabilities, names with reasons. Never estimates: the union bound (GEMINI's Corollary 1)
is what the first term of these sums would be.

How it counts. Groups lose nodes independently, so the survivable k-subsets of all nodes are the
coefficient of x^k in the product of one polynomial a group, whose x^j counts the group's survivable
j-subsets. In a ring of L that must not lose m consecutive members these are the cyclic arrangements
of z = L - j survivors with gaps below m between them: each of the W(z, j) gap sequences, turned to
L places, counts every arrangement z times, hence L * W(z, j) / z.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from keepstep.model.topology import Group, Placement


def survivable(group: Group) -> list[int]:
    """How many of the group's subsets of j lost members, j = 0, 1, .., leave every snapshot within
    reach."""
    size = len(group.members)
    if group.ring:
        return [_ring(size, lost, group.tolerates + 1) for lost in range(size)]
    return [comb(size, lost) for lost in range(group.tolerates + 1)]


def _ring(size: int, lost: int, run: int) -> int:
    """Subsets of `lost` places on a circle of `size` without `run` consecutive ones; at least one
    place is left."""
    left = size - lost
    # Gap sequences: `left` numbers below `run` that sum to `lost`, by inclusion and exclusion.
    gaps = sum(
        (-1) ** i * comb(left, i) * comb(lost - i * run + left - 1, left - 1)
        for i in range(min(left, lost // run) + 1)
    )
    return int(size * gaps // left)


def survivable_counts(groups: Iterable[Group], most: int) -> list[int]:
    """How many subsets of k lost nodes are survived, k = 0..most."""
    total = [1]
    for group in groups:
        total = _times(total, survivable(group), most)
    return total + [0] * (most + 1 - len(total))


def _times(a: Sequence[int], b: Sequence[int], most: int) -> list[int]:
    product = [0] * min(len(a) + len(b) - 1, most + 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b[: len(product) - i]):
            product[i + j] += x * y
    return product


def survival(groups: Sequence[Group], most: int) -> dict[int, Fraction]:
    """Probability that memory survives k nodes lost at once, all k-subsets equally likely, k =
    1..most."""
    nodes = sum(len(group.members) for group in groups)
    assert most <= nodes, f"{most} of {nodes} nodes lost"
    counts = survivable_counts(groups, most)
    return {k: Fraction(counts[k], comb(nodes, k)) for k in range(1, most + 1)}


def survival_at(groups: Iterable[Group], keep: float) -> float:
    """Probability that memory survives a window in which each node keeps its memory with
    probability `keep`."""
    result = 1.0
    for group in groups:
        size = len(group.members)
        result *= sum(
            count * keep ** (size - lost) * (1 - keep) ** lost
            for lost, count in enumerate(survivable(group))
        )
    return result


@dataclass(frozen=True, slots=True)
class Losable:
    """The answer to "which nodes can I lose right now?".

    `any_nodes`: so many may go at once, whichever they are; 0 when some node must stay, -1 when
        something is out of reach already.
    `critical`: nodes that must stay, each with whose snapshots go with it. `out_of_reach`:
        snapshots that memory no longer has.
    """

    safe: tuple[int, ...]
    critical: Mapping[int, tuple[int, ...]]
    out_of_reach: tuple[int, ...]
    any_nodes: int
    why: str


def out_of_reach(
    placement: Placement, proven: Mapping[int, Collection[int]], lost: Collection[int] = ()
) -> tuple[int, ...]:
    """Owners whose snapshot cannot be restored from memory after `lost`.

    `proven[owner]`: the nodes that hold a proven part in its snapshot: itself, a copy, or a
    member's data and parity.
    """
    return tuple(
        sorted(
            owner
            for group in placement.groups
            for owner in group.members
            if not _reachable(group, owner, set(proven.get(owner, ())) - set(lost))
        )
    )


def _reachable(group: Group, owner: int, have: set[int]) -> bool:
    return owner in have or len(have) >= group.needed


def which_can_be_lost(
    placement: Placement, alive: Collection[int], proven: Mapping[int, Collection[int]]
) -> Losable:
    """From what is proven now, not from what the policy promises: a copy still in flight protects
    nobody."""
    critical: dict[int, list[int]] = {}
    gone, spare = [], len(alive)
    for group in placement.groups:
        for owner in group.members:
            have = {
                node
                for node in proven.get(owner, ())
                if node in alive and node in group.holders(owner)
            }
            if not _reachable(group, owner, have):
                gone.append(owner)
                continue
            # The owner and as many others as leave too few: the smallest loss that takes this
            # snapshot.
            spare = min(spare, max(1, len(have) - group.needed + 1) - 1)
            for node in have:
                if not _reachable(group, owner, have - {node}):
                    critical.setdefault(node, []).append(owner)
    safe = tuple(node for node in sorted(alive) if node not in critical)
    fatal = {node: tuple(sorted(owners)) for node, owners in sorted(critical.items())}
    return Losable(
        safe,
        fatal,
        tuple(sorted(gone)),
        -1 if gone else spare,
        _sentence(safe, fatal, sorted(gone), spare),
    )


def _sentence(
    safe: Sequence[int], critical: Mapping[int, tuple[int, ...]], gone: Sequence[int], spare: int
) -> str:
    if gone:
        return f"memory no longer has the snapshots of {_names(gone)}: only the store does"
    if critical:
        node, owners = next(iter(critical.items()))
        example = f"with node {node} would go the snapshots of {_names(owners)}"
        return f"{_names(tuple(critical))} must stay ({example}); safe to lose: {_names(safe)}"
    return (
        f"any {spare} of {len(safe)} nodes may be lost at once"
        if spare > 1
        else f"any one of {len(safe)} nodes may be lost"
    )


def _names(nodes: Sequence[int]) -> str:
    if not nodes:
        return "none"
    shown = ", ".join(str(node) for node in nodes[:8]) + (
        f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    )
    return f"node{'s' if len(nodes) > 1 else ''} {shown}"
