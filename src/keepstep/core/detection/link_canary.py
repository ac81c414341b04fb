"""Link canary: a slow link that the links' judge is shown before it is believed, and now and then
again.

Comes in: a judge. Goes out: why it cannot be believed, empty where it sees a direction that takes
four times as long as it did. The judge itself learns nothing of it: a copy of it is shown, and of a
large mesh a few of its directions.
"""

from __future__ import annotations

from keepstep.core.detection.links import (
    LEAST_PAST,
    LONG,
    SETTLED,
    Direction,
    SlowLink,
    SlowLinks,
)
from keepstep.model.links import LinkSample
from keepstep.model.units import MIB, MS_NS, S_NS

SLOWER = 4
MOST_SHOWN = 8  # directions
BUSY_NS = 100 * MS_NS
USUAL = LinkSample(100 * MIB, BUSY_NS)
# node 0 to node 1, and a direction beside it in its row and in its column
DIRECTIONS: tuple[Direction, ...] = ((0, 1), (0, 2), (2, 1))
BLIND = "what judges the links does not see a slow one that is planted"


def flaw_of_fresh_links() -> str:
    """Of a judge as it is made."""
    judge = SlowLinks([None] * 3)
    for _ in range(LEAST_PAST + LONG + 1):
        for sender, receiver in DIRECTIONS:
            judge.add(sender, receiver, USUAL)
    if _settled_news(judge):
        return f"{BLIND}: it calls slow what is as it was"
    return _flaw(judge, DIRECTIONS[0])


def flaw_of_links(links: SlowLinks, turn: int) -> str:
    """Of one that judges; nothing is said while it calls nothing well. turn: another direction each
    time."""
    well = links.well
    if not well:
        return ""
    chosen = well[turn % len(well)]
    row = [cell for cell in well if cell[0] == chosen[0] and cell != chosen]
    return _flaw(links.copy_of([chosen, *row[: MOST_SHOWN - 1]]), chosen)


def _flaw(judge: SlowLinks, chosen: Direction) -> str:
    """The judge is spent then."""
    usual = judge.usual_bytes_per_s(chosen)
    slow = LinkSample(max(1, round(usual / SLOWER * BUSY_NS / S_NS)), BUSY_NS)
    for _ in range(LONG):
        judge.add(*chosen, slow)
    named = [cell for told in _settled_news(judge) for cell in told.cells]
    return "" if chosen in named else f"{BLIND}, from node {chosen[0]} to node {chosen[1]}"


def _settled_news(judge: SlowLinks) -> list[SlowLink]:
    """What it calls slow once it has looked often enough to say so."""
    told = [each for _ in range(SETTLED) for each in judge.news()]
    return [each for each in told if isinstance(each, SlowLink)]
