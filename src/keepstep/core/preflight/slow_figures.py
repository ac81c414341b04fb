"""Slow figures: whose own measurements lie below a floor, or behind the fleet's; and the second
look that each of them is given.

Comes in: readings of every node, which machine each is on. Goes out: what is slow, with a sentence;
which checks each node is to run once more; both looks as one.

Slow once accuses nobody: a neighbour's write or a job that ends takes a second. What counts is the
faster of two looks. What was wrong in one of them stays wrong: bytes do not differ by chance.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from keepstep.core.preflight.catalogue import (
    CHECK_OF,
    RING,
    Quantity,
    in_words,
    is_below_floor,
)
from keepstep.core.preflight.outliers import middle_of, outliers
from keepstep.model.messages.preflight import CheckOutcome, CheckReading, Samples

ByNode = Mapping[int, tuple[CheckReading, ...]]
WORST_FIRST = (CheckOutcome.BAD, CheckOutcome.UNKNOWN, CheckOutcome.OK, CheckOutcome.SKIPPED)


@dataclass(frozen=True, slots=True)
class SlowFigure:
    """Of one node. `found`: the figure, and what it was compared with."""

    check: str
    node: int
    found: str


def slow_figures(
    readings: ByNode, machines: Mapping[int, str], quantities: Mapping[str, Quantity]
) -> Iterator[SlowFigure]:
    """In the order of the quantities."""
    shared = Counter(machines.values())
    for name, quantity in quantities.items():
        by_node = samples_of(readings, name)
        check, measure = CHECK_OF[name].name, quantity.measure
        below = [
            node for node, values in by_node.items() if is_below_floor(quantity, middle_of(values))
        ]
        for node in below:
            value, floor = middle_of(by_node[node]), in_words(measure, quantity.floor)
            yield SlowFigure(
                check, node, f"{name} is {in_words(measure, value)}, the floor is {floor}"
            )
        if quantity.is_shared:
            alone = {n for n in by_node if shared[machines.get(n, "")] == 1}
            by_node = {node: by_node[node] for node in alone}
        for slow in outliers(by_node, quantity):
            if slow.node not in below:
                yield SlowFigure(
                    check,
                    slow.node,
                    f"{name} is {in_words(measure, slow.value)}, "
                    f"{in_words(measure, slow.others)} on the others: {slow.ratio:.2f} "
                    f"times as fast, at least {slow.least_ratio:.2f} passes",
                )


def samples_of(readings: ByNode, quantity: str) -> dict[int, tuple[int, ...]]:
    """By node."""
    return {
        node: samples.values
        for node, own in readings.items()
        for reading in own
        for samples in reading.samples
        if samples.quantity == quantity and samples.values
    }


def second_looks(
    readings: ByNode, machines: Mapping[int, str], quantities: Mapping[str, Quantity]
) -> dict[int, frozenset[str]]:
    """By node, the checks that it runs once more. The ring is run by all together, and has no
    second look."""
    names: dict[int, set[str]] = defaultdict(set)
    for slow in slow_figures(readings, machines, quantities):
        if slow.check != RING:
            names[slow.node].add(slow.check)
    return {node: frozenset(checks) for node, checks in names.items()}


def both_looks(
    first: ByNode, again: ByNode, quantities: Mapping[str, Quantity]
) -> tuple[dict[int, tuple[CheckReading, ...]], frozenset[tuple[int, str]]]:
    """All readings, of what was looked at twice the worse outcome and the faster samples of each
    quantity; and the nodes and checks that were. A second look without an answer was none."""
    second = {
        (node, reading.check): reading
        for node, readings in again.items()
        for reading in readings
        if reading.outcome is not CheckOutcome.UNKNOWN
    }
    found = {
        node: tuple(
            _both(reading, second.get((node, reading.check)), quantities) for reading in readings
        )
        for node, readings in first.items()
    }
    return found, frozenset(second)


def _both(
    first: CheckReading, again: CheckReading | None, quantities: Mapping[str, Quantity]
) -> CheckReading:
    if again is None:
        return first
    worse = min(first, again, key=lambda reading: WORST_FIRST.index(reading.outcome))
    others = {samples.quantity: samples for samples in again.samples}
    faster = tuple(
        _faster(each, others.get(each.quantity), quantities.get(each.quantity))
        for each in first.samples
    )
    return replace(
        worse, samples=faster, traits=first.traits, took_ms=first.took_ms + again.took_ms
    )


def _faster(first: Samples, again: Samples | None, quantity: Quantity | None) -> Samples:
    if again is None or quantity is None or not again.values or not first.values:
        return first
    pick = max if quantity.measure.is_better_high else min
    return pick(first, again, key=lambda samples: middle_of(samples.values))
