"""Clock gaps: how far apart the nodes' wall clocks are, and whose is wrong.

Comes in: of each measured pair, how far the other's clock is ahead and within what that is certain
(`edge/preflight/link_probe.py` measures it by round trips). Goes out: each node's distance to the
fleet's time, its bound, and who is off.

A reading of another's clock is off by at most half of its round trip (Cristian, Probabilistic clock
synchronization, 1989). Bounds add up along a path, so each node's clock is read over the path from
the first node with the smallest sum: a large fleet measures only some of its pairs. The fleet's
time is the median. A node is off only when the bound cannot explain it; who may be off and may not
be is unknown. More than half of the nodes must be near the median: else nobody can tell who is
right, and all that differ are named together.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from keepstep.model.messages.preflight import ClockGap, LinkReading


@dataclass(frozen=True, slots=True)
class FleetClocks:
    """gaps: of each node to the fleet's time. `off`: whose clock is wrong for certain.
    `is_decided`: a majority says so. `unsure`: nodes whose bound is wider than the limit, and who
    may be off. `unseen`: nodes of which nothing was measured."""

    gaps: dict[int, ClockGap]
    off: tuple[int, ...]
    is_decided: bool
    unsure: tuple[int, ...]
    unseen: tuple[int, ...]


def judge_clocks(nodes: Iterable[int], links: Iterable[LinkReading], limit_ns: int) -> FleetClocks:
    """From everything that was measured of these nodes."""
    wanted = sorted(nodes)
    read = _over_best_paths(wanted, links)
    unseen = tuple(node for node in wanted if node not in read)
    if len(read) < 2:
        return FleetClocks({}, (), True, (), tuple(wanted))
    order = sorted(read, key=lambda node: (read[node].ahead_ns, node))
    middle = read[order[(len(order) - 1) // 2]]
    gaps = {
        node: ClockGap(
            gap.ahead_ns - middle.ahead_ns,
            0 if gap == middle else gap.within_ns + middle.within_ns,
        )
        for node, gap in sorted(read.items())
    }
    off = tuple(n for n, gap in gaps.items() if abs(gap.ahead_ns) - gap.within_ns > limit_ns)
    is_decided = 2 * len(off) < len(gaps)
    unsure = tuple(
        node
        for node, gap in gaps.items()
        if node not in off and abs(gap.ahead_ns) + gap.within_ns > limit_ns
    )
    if not is_decided:
        off, unsure = tuple(gaps), ()
    return FleetClocks(gaps, off, is_decided, unsure, unseen)


def _over_best_paths(nodes: list[int], links: Iterable[LinkReading]) -> dict[int, ClockGap]:
    """How far each is ahead of the first of those that were measured at all."""
    ways: dict[int, list[tuple[int, ClockGap]]] = defaultdict(list)
    for link in links:
        if link.clock is not None:
            ways[link.one].append((link.other, link.clock))
            ways[link.other].append(
                (link.one, ClockGap(-link.clock.ahead_ns, link.clock.within_ns))
            )
    first = next((node for node in nodes if ways[node]), None)
    found: dict[int, ClockGap] = {}
    waiting = [] if first is None else [(0, first, 0)]
    while waiting:
        within_ns, node, ahead_ns = heapq.heappop(waiting)
        if node in found:
            continue
        found[node] = ClockGap(ahead_ns, within_ns)
        for other, gap in ways[node]:
            if other not in found:
                heapq.heappush(waiting, (within_ns + gap.within_ns, other, ahead_ns + gap.ahead_ns))
    return {node: gap for node, gap in found.items() if node in nodes}
