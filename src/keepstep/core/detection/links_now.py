"""Links now: which links are slow and which damage what crosses them, as a node's journal tells.

Comes in: events, in their order, and the time. Goes out: for each slow link and each node whose
messages come damaged, what the journal told of it last.

Invariant: a link is slow from `slow-link` on until `slow-link-over`. Damage is told anew each
minute while it lasts, so what was told two minutes ago is over. Nothing outlives the mesh of nodes
it was seen in: whoever watches a new one has forgotten all, and would never say that it is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepstep.core.detection.damage import WINDOW_NS
from keepstep.core.detection.slow_now import FRESH
from keepstep.model.events import Event

LASTS_NS = 2 * WINDOW_NS
NEW_MESH = (*FRESH, "keeper-started", "mesh")


@dataclass(frozen=True, slots=True)
class SlowLinkTold:
    """`side` and `nodes` name it (core/detection/links.py), `ratio`: how many times slower it was
    when it was told."""

    side: str
    nodes: tuple[int, ...]
    ratio: float
    cause: str
    event: Event


@dataclass(frozen=True, slots=True)
class DamageTold:
    """`count`: of messages and blocks from `node` within a minute."""

    node: int
    count: int
    event: Event


class LinksNow:
    """What was told until now."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._slow: dict[tuple[str, tuple[int, ...]], SlowLinkTold] = {}
        self._damage: dict[int, DamageTold] = {}
        self._damaged: dict[int, int] = {}
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        if event.kind in NEW_MESH:
            self._slow.clear()
            self._damage.clear()
        elif event.kind == "slow-link":
            side, nodes = key = _link(event)
            ratio = event.data.get("ratio")
            slower = float(ratio) if isinstance(ratio, (int, float)) else 1.0
            cause = str(event.data.get("cause", ""))
            self._slow[key] = SlowLinkTold(side, nodes, slower, cause, event)
        elif event.kind == "slow-link-over":
            self._slow.pop(_link(event), None)
        elif event.kind == "link-damages":
            node, count = event.data.get("node"), event.data.get("count")
            if isinstance(node, int) and isinstance(count, int):
                self._damage[node] = DamageTold(node, count, event)
                self._damaged[node] = self._damaged.get(node, 0) + count

    def slow(self) -> tuple[SlowLinkTold, ...]:
        """By side and nodes."""
        return tuple(told for _, told in sorted(self._slow.items()))

    def damaging(self, now_ns: int, boot: str) -> tuple[DamageTold, ...]:
        """By node. now_ns: of that boot's monotonic clock."""
        return tuple(
            told
            for _, told in sorted(self._damage.items())
            if told.event.boot == boot and now_ns - told.event.mono_ns < LASTS_NS
        )

    def damaged_counts(self) -> dict[int, int]:
        """By node: how many messages and blocks were told to be damaged, in all."""
        return dict(sorted(self._damaged.items()))


def _link(event: Event) -> tuple[str, tuple[int, ...]]:
    nodes = event.data.get("nodes")
    named = [node for node in nodes if isinstance(node, int)] if isinstance(nodes, list) else []
    return str(event.data.get("side", "")), tuple(named)
