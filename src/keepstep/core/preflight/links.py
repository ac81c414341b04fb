"""Links: which node sends or receives slowly, and which single link is slow between sound nodes.

Comes in: the pairs' measurements, first of all pairs, then confirming ones. Goes out: who is
suspected, and in the end who is at fault.

A link, in one direction, is slow when it is below the floor or behind what a quarter of all links
reach: not their median, because one bad node of three or four makes half of all links slow. A link
that cannot be measured counts as one of no speed at all.

Suspects are found by a greedy cover: the node with the most slow links explains them; a slow link
between two others that nothing else accuses makes both suspects. Each is then measured with
partners that are suspects of nothing, and the slow pairs once more. Only what is slow every time is
a fault: a node with every good partner (in one direction, or in both), else the link between the
two. So one that is slow by chance once accuses nobody.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from keepstep.core.preflight.catalogue import Measure, Quantity, is_below_floor, is_harmless
from keepstep.core.preflight.outliers import (
    FEWEST_NODES,
    allowed_lag,
    deviation,
    middle_of,
    speeds,
    value_of,
)
from keepstep.core.preflight.schedule import Pair, pair
from keepstep.model.messages.preflight import LinkReading

Direction = tuple[int, int]  # from, to
REACHED_BY = 0.75  # of the links: what a quarter of them is faster than


class FaultSide(Enum):
    """What is slow, for a sentence."""

    SENDS = "sends"
    RECEIVES = "receives"
    BOTH = "sends and receives"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class LinkFault:
    """`nodes`: one, or the two ends of a link. `value`: its fastest measurement, `usual`: what a
    quarter of the fleet's links reach, None: there is no fleet to compare with. `error`: why it
    could not be measured."""

    side: FaultSide
    nodes: tuple[int, ...]
    value: int
    usual: int | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class LinkSuspicion:
    """After one series of all pairs. `good`: nodes that no slow link accuses."""

    pairs: tuple[Pair, ...]
    suspects: tuple[int, ...]
    good: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinkScale:
    """What is slow. `usual`: in log space, None: no fleet."""

    quantity: Quantity
    usual: float | None
    allowed: float

    def is_slow(self, value: int) -> bool:
        if value == 0 or is_below_floor(self.quantity, value):
            return True
        if self.usual is None or is_harmless(self.quantity, value):
            return False
        return self.usual - speeds([value], self.quantity)[0] > self.allowed

    @property
    def usual_value(self) -> int | None:
        return None if self.usual is None else value_of(self.usual, self.quantity)


def suspect(readings: Sequence[LinkReading], quantities: Iterable[Quantity]) -> LinkSuspicion:
    """Whom to measure again."""
    slow: set[Pair] = set()
    for quantity in quantities:
        scale = scale_of(readings, quantity)
        slow |= {pair(*way) for way, value in figures(readings, quantity) if scale.is_slow(value)}
    nodes = sorted({node for reading in readings for node in (reading.one, reading.other)})
    suspects = cover(slow)
    return LinkSuspicion(
        tuple(sorted(slow)),
        tuple(sorted(suspects)),
        tuple(node for node in nodes if node not in suspects),
    )


def cover(slow: Collection[Pair]) -> set[int]:
    """Who explains these pairs: as few nodes as a greedy choice finds. Where two nodes explain a
    pair equally well, both."""
    left, suspects = set(slow), set()
    while left:
        counts = Counter(node for each in left for node in each)
        most = max(counts.values())
        chosen = {min(node for node, count in counts.items() if count == most)}
        if most == 1:
            chosen = set(counts)
        suspects |= chosen
        left = {each for each in left if not chosen & set(each)}
    return suspects


def faults(
    first: Sequence[LinkReading],
    confirming: Sequence[Sequence[LinkReading]],
    quantity: Quantity,
    suspicion: LinkSuspicion,
) -> list[LinkFault]:
    """What is slow every time. confirming: one series after the other. suspicion: from `first`."""
    scale = scale_of(first, quantity)
    again = [reading for series in confirming for reading in series]
    everything = figures([*first, *again], quantity)
    errors = {pair(r.one, r.other): r.error for r in [*first, *again] if r.error}
    found = []
    for node in suspicion.suspects:
        side, value = _side(node, suspicion.good, figures(again, quantity), scale)
        if side is not None:
            error = next((errors[each] for each in errors if node in each), "") if not value else ""
            found.append(LinkFault(side, (node,), value, scale.usual_value, error))
    blamed = {node for fault in found for node in fault.nodes}
    for each in suspicion.pairs:
        if blamed & set(each):
            continue
        ways = [[v for way, v in everything if way == (a, b)] for a, b in (each, each[::-1])]
        slow = [values for values in ways if values and all(map(scale.is_slow, values))]
        if slow:
            value = max((value for values in slow for value in values), key=_speed_of(quantity))
            error = errors.get(each, "") if not value else ""
            found.append(LinkFault(FaultSide.LINK, each, value, scale.usual_value, error))
    return found


def scale_of(readings: Sequence[LinkReading], quantity: Quantity) -> LinkScale:
    """From a series of all pairs. Fewer than three nodes are no fleet."""
    nodes = {node for reading in readings for node in (reading.one, reading.other)}
    samples = [values for _, values in ways_of(readings, quantity) if values]
    if len(nodes) < FEWEST_NODES or not samples:
        return LinkScale(quantity, None, 0.0)
    logs = sorted(median(speeds(values, quantity)) for values in samples)
    noise = median(deviation(speeds(values, quantity)) for values in samples)
    usual = logs[math.ceil(REACHED_BY * (len(logs) - 1))]
    return LinkScale(quantity, usual, allowed_lag(quantity, noise))


def figures(readings: Iterable[LinkReading], quantity: Quantity) -> list[tuple[Direction, int]]:
    """The figure of each direction that was measured; 0 where it could not be."""
    return [
        (way, middle_of(values) if values else 0) for way, values in ways_of(readings, quantity)
    ]


def ways_of(
    readings: Iterable[LinkReading], quantity: Quantity
) -> list[tuple[Direction, tuple[int, ...]]]:
    """Samples by direction. A round trip is the same in both."""
    found: list[tuple[Direction, tuple[int, ...]]] = []
    for reading in readings:
        there, back = reading.there_bytes_per_s, reading.back_bytes_per_s
        if quantity.measure is Measure.NS:
            there = back = reading.round_trip_ns
        found += [((reading.one, reading.other), there), ((reading.other, reading.one), back)]
    return found


def _side(
    node: int, good: Sequence[int], again: list[tuple[Direction, int]], scale: LinkScale
) -> tuple[FaultSide | None, int]:
    """How it does with good partners, and the best of what makes it a fault."""
    sent = [value for (one, other), value in again if one == node and other in good]
    got = [value for (one, other), value in again if other == node and one in good]
    slow = {
        FaultSide.SENDS: bool(sent) and all(map(scale.is_slow, sent)),
        FaultSide.RECEIVES: bool(got) and all(map(scale.is_slow, got)),
    }
    best = _speed_of(scale.quantity)
    if all(slow.values()):
        return FaultSide.BOTH, max([*sent, *got], key=best)
    if slow[FaultSide.SENDS]:
        return FaultSide.SENDS, max(sent, key=best)
    if slow[FaultSide.RECEIVES]:
        return FaultSide.RECEIVES, max(got, key=best)
    return None, 0


def _speed_of(quantity: Quantity) -> Callable[[int], float]:
    """A key by which the fastest of figures is the largest; one that could not be measured is the
    slowest."""
    return lambda value: speeds([value], quantity)[0] if value else -math.inf
