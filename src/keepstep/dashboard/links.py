"""Links: which links are slow or damage what crosses them now, as this node's journal tells.

Comes in: what its events tell, the time. Goes out: rows. The leading keeper tells of slow links, so
they are in its node's journal alone; damage is told by whoever received it.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.core.detection.links_now import LinksNow
from keepstep.dashboard.moment import Moment
from keepstep.model.events import Event


@dataclass(frozen=True, slots=True)
class SlowLinkRow:
    """`side`: sender, receiver, node, link, switch or unclear; `cause`: loss, reader or speed
    (core/detection/links.py). `ratio`: how many times slower than before."""

    side: str
    nodes: tuple[int, ...]
    ratio: float
    cause: str
    why: str
    age_ns: int


@dataclass(frozen=True, slots=True)
class DamageRow:
    """What comes from `node` damaged: `count` messages and blocks within a minute."""

    node: int
    count: int
    why: str
    age_ns: int


@dataclass(frozen=True, slots=True)
class LinkRows:
    """Of one moment."""

    slow: tuple[SlowLinkRow, ...] = ()
    damages: tuple[DamageRow, ...] = ()


def link_rows(links: LinksNow, now: Moment) -> LinkRows:
    """What is slow or damages now."""

    def age_ns(event: Event) -> int:
        return max(0, now.wall_ns - event.wall_ns)

    return LinkRows(
        tuple(
            SlowLinkRow(t.side, t.nodes, t.ratio, t.cause, t.event.why, age_ns(t.event))
            for t in links.slow()
        ),
        tuple(
            DamageRow(t.node, t.count, t.event.why, age_ns(t.event))
            for t in links.damaging(now.mono_ns, now.boot)
        ),
    )
