"""Placement: decides which nodes protect each other, once, when a job starts.

Comes in: what redundancy was asked for and the nodes with their racks. Goes out: groups, each with
what it tolerates, and why. Never looks at what has been proven since (`core/redundancy/survival.py`
does).

* `copies:m` is GEMINI's Algorithm 1: groups of m in which everybody holds everybody; when m does
  not divide N the leftovers join the last group, and it becomes a ring in which each member sends
  to the next m - 1.
* `parity:n` (REFT) and `rs:k+m` need no exact size: as many groups as come nearest to the size
  asked for, whose sizes differ by at most one, and none too small for what it promises to survive.
* Racks: no two members of a group, hence no two holders of a snapshot, share one. A Reed-Solomon
  group may have up to m members in a rack when there are not racks enough, because it survives the
  loss of any m; as few as possible are taken.

Invariant: every node is in exactly one group, and losing any one rack (or node, without racks)
loses no snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from keepstep.core.redundancy.survival import survival_at
from keepstep.errors import ConfigError
from keepstep.model.topology import (
    Copies,
    Group,
    NoRedundancy,
    Parity,
    Placement,
    ReedSolomon,
    Scheme,
    Topology,
)
from keepstep.model.units import human_bytes


def place(policy: Scheme, topology: Topology) -> Placement:
    """The placement. Raises ConfigError when there are too few nodes, or racks that cannot be kept
    apart."""
    count = len(topology.nodes)
    match policy:
        case NoRedundancy():
            groups = tuple(Group((node.id,), 0) for node in topology.nodes)
            return Placement(
                policy,
                groups,
                "none",
                "no redundancy was asked for: a lost node's snapshot is lost from memory",
            )
        case Copies(m):
            return _copies(policy, m, count, topology)
        case Parity(n):
            return _coded(policy, n, 1, count, topology)
        case ReedSolomon(k, m):
            return _coded(policy, k + m, m, count, topology)


def _copies(policy: Scheme, m: int, count: int, topology: Topology) -> Placement:
    _enough(policy, m, count)
    sizes = [m] * (count // m)
    sizes[-1] += count % m
    *rest, last = _members(policy, sizes, 1, topology)
    ring = last if count % m else ()
    cliques = rest if ring else [*rest, last]
    groups = [Group(members, m - 1) for members in cliques] + (
        [Group(ring, m - 1, ring=True)] if ring else []
    )
    why = f"{count} nodes in {_groups(len(cliques))} of {m}" if cliques else f"{count} nodes"
    if ring:
        where = (
            f"{'; ' if cliques else ' as '}a ring of {len(ring)} in which each sends to the next "
            f"{m - 1}"
        )
        why += f"{where}, because {m} does not divide {count}"
    return Placement(policy, tuple(groups), "mixed" if ring else "group", why + _apart(topology, 1))


def _coded(policy: Scheme, size: int, tolerates: int, count: int, topology: Topology) -> Placement:
    _enough(policy, size, count)
    nearest = (2 * count + size) // (2 * size)
    groups = max(1, min(nearest, count // (tolerates + 1)))
    sizes = [count // groups + (i < count % groups) for i in range(groups)]
    # Racks: one member of a rack in a group if that can be; else, for a code that survives more, a
    # few.
    fullest = max((len(ids) for ids in topology.racks.values()), default=1)
    together = min(max(1, -(-fullest // groups)), tolerates)
    members = _members(policy, sizes, together, topology)
    why = (
        f"{count} nodes in {_groups(groups)} of {_span(sizes)}, each survives any {tolerates} of "
        "its members lost"
    )
    if set(sizes) != {size}:
        why += f" (the sizes nearest to the {size} asked for)"
    strategy = "parity" if isinstance(policy, Parity) else "rs"
    return Placement(
        policy,
        tuple(Group(ids, tolerates) for ids in members),
        strategy,
        why + _apart(topology, together),
    )


def _enough(policy: Scheme, least: int, found: int) -> None:
    if found < least:
        raise ConfigError(f"{policy}: expected at least {least} nodes, found {found}")


def _members(
    policy: Scheme, sizes: Sequence[int], together: int, topology: Topology
) -> list[tuple[int, ...]]:
    """Nodes for groups of these sizes, in order, with at most `together` of a rack in a group."""
    if not topology.racks:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)
        ]
    # Taking each member from the fullest rack that may still give is exact: if any choice fills all
    # groups, this one does (from another choice one can always swap towards the fuller rack). Among
    # equals, the rack named first.
    waiting = [list(ids) for ids in topology.racks.values()]
    may_give = [(-len(ids), rack) for rack, ids in enumerate(waiting)]
    heapify(may_give)
    groups = []
    for size in sizes:
        chosen: list[int] = []
        given: dict[int, int] = {}
        resting: list[tuple[int, int]] = []  # racks that gave this group what they may
        while len(chosen) < size:
            if not may_give:
                raise ConfigError(_too_close(policy, sizes, together, topology))
            _, rack = heappop(may_give)
            chosen.append(waiting[rack].pop(0))
            given[rack] = given.get(rack, 0) + 1
            if waiting[rack]:
                heappush(
                    may_give if given[rack] < together else resting, (-len(waiting[rack]), rack)
                )
        for entry in resting:
            heappush(may_give, entry)
        groups.append(tuple(sorted(chosen)))
    return groups


def _too_close(policy: Scheme, sizes: Sequence[int], together: int, topology: Topology) -> str:
    limit = "one node" if together == 1 else f"{together} nodes"
    found = ", ".join(f"{rack} of {len(ids)}" for rack, ids in topology.racks.items())
    return (
        f"{policy}: expected racks that fill {_groups(len(sizes))} of {_span(sizes)} nodes "
        f"with at most {limit} of a rack in a group, "
        f"so that a lost rack loses no snapshot; found {len(topology.racks)} racks: {found}. "
        "Use more racks, smaller groups, "
        "or leave the racks out and accept that a rack may take a snapshot with it"
    )


def _groups(count: int) -> str:
    return f"{count} group{'' if count == 1 else 's'}"


def _span(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low} to {high}"


def _apart(topology: Topology, together: int) -> str:
    if not topology.racks:
        return ""
    return (
        "; no two of a group share a rack"
        if together == 1
        else f"; at most {together} of a group share a rack"
    )


@dataclass(frozen=True, slots=True)
class Facts:
    """What `auto` looks at. `free_bytes`: a node's memory for slots, before the first one;
    `snapshot_bytes`: one node's state."""

    topology: Topology
    free_bytes: int
    snapshot_bytes: int
    failures_per_node_hour: float


CANDIDATES: tuple[Scheme, ...] = (
    # In the order of preference. Copies first: nothing to encode, and one holder alone restores.
    # Then least traffic.
    *(Copies(2), Parity(3), Parity(4), Parity(8)),
    *(Copies(3), ReedSolomon(4, 2), ReedSolomon(8, 2)),
)
HEADROOM_RATIO = 0.05  # of the free memory, left alone
# from a node's loss until its replacement is protected again; GEMINI reports 12 minutes
REPAIR_H = 0.25
ACCEPTED_DAYS = 30.0  # a fall back to the store once in so many days is cheap enough


def auto(facts: Facts) -> tuple[Scheme, str]:
    """The first candidate that fits and falls back to the store rarely enough, else the safest that
    fits; and why."""
    refused: list[str] = []
    fitting: list[tuple[float, Scheme]] = []
    for policy in CANDIDATES:
        try:
            placement = place(policy, facts.topology)
        except ConfigError as error:
            refused.append(str(error).split(". ")[0])
            continue
        need_bytes = math.ceil(placement.two_slots_ratio * facts.snapshot_bytes)
        if need_bytes > facts.free_bytes * (1 - HEADROOM_RATIO):
            refused.append(
                f"{policy} needs {human_bytes(need_bytes)} a node of "
                f"{human_bytes(facts.free_bytes)} free"
            )
            continue
        days = _days_between_fallbacks(placement, facts.failures_per_node_hour)
        if days >= ACCEPTED_DAYS:
            return policy, _because(policy, need_bytes, days, facts, refused)
        refused.append(f"{policy} would fall back to the store every {days:.2g} days")
        fitting.append((days, policy))
    if not fitting:
        return NoRedundancy(), f"none: nothing else is possible here: {'; '.join(refused)}."
    _, policy = max(fitting, key=lambda pair: pair[0])
    return (
        policy,
        f"{policy}: the safest that fits; none goes {ACCEPTED_DAYS:.0f} days without the "
        f"store: {'; '.join(refused)}.",
    )


def _days_between_fallbacks(placement: Placement, failures_per_node_hour: float) -> float:
    """Mean time until the losses of one repair window exceed what memory survives."""
    lost = 1 - survival_at(placement.groups, math.exp(-failures_per_node_hour * REPAIR_H))
    return REPAIR_H / 24 / lost if lost > 0 else math.inf


def _because(
    policy: Scheme, need_bytes: int, days: float, facts: Facts, refused: Sequence[str]
) -> str:
    often = (
        f"it falls back to the store once in {days:,.0f} days"
        if days < 1e6
        else "it practically never falls back to the store"
    )
    asked = (
        f"{len(facts.topology.nodes)} nodes that each fail {facts.failures_per_node_hour:g} "
        "times an hour"
    )
    reasons = f" Refused before it: {'; '.join(refused)}." if refused else ""
    return (
        f"{policy}: {human_bytes(need_bytes)} a node of {human_bytes(facts.free_bytes)} free, "
        f"and with {asked} {often}.{reasons}"
    )
