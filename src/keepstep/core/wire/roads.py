"""Roads: from which of its own addresses a channel is dialled, to which of the other side's.

A node has an address on each of its network interfaces that copies may use, in the same order on
every node: the first of one side goes with the first of the other, as rails do. A stream has a road
of its own by its number. When that cannot be dialled its next attempts take the others, those that
belong together first.

Comes in: the addresses of both sides, the stream, how often it was tried. Goes out: a road. Decides
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.model.wire import MAX_STREAMS, Address


@dataclass(frozen=True, slots=True)
class Road:
    """`source`: the own address to dial from. `is_only`: there is no other."""

    source: str
    target: Address
    is_only: bool


def width(mine: int, theirs: int) -> int:
    """How many roads have an interface of their own at one end at least, by the numbers of
    addresses."""
    return min(MAX_STREAMS, max(mine, theirs))


def road(mine: Sequence[str], theirs: Sequence[Address], stream: int, attempt: int) -> Road:
    """`attempt`: how often in vain it was dialled since it was carried last."""
    count = width(len(mine), len(theirs))
    together = [(each % len(mine), each % len(theirs)) for each in range(count)]
    crossed = [
        (here, there)
        for here in range(len(mine))
        for there in range(len(theirs))
        if (here, there) not in together
    ]
    first = stream % count
    ways = [*together[first:], *together[:first], *crossed]
    here, there = ways[attempt % len(ways)]
    return Road(mine[here], theirs[there], len(ways) == 1)
