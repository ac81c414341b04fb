"""Links now: which links are slow and which damage what crosses them, as a node's journal tells.

Comes in: events, in their order, and the time. Goes out: for each slow link and each node whose
messages come damaged, what the journal told of it last.

Invariant: a link is slow from `slow-link` on until `slow-link-over`. In a mesh of several nodes
nobody can tell of any link until the leading keeper has told that one reason for that is over, and
no other one holds; other nodes' journals never tell. Damage is told anew each
minute while it lasts, so what was told two minutes ago is over. Nothing outlives the mesh of nodes
it was seen in: whoever watches a new one has forgotten all, and would never say that it is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepstep.core.detection.damage import WINDOW_NS
from keepstep.core.detection.slow_now import FRESH
from keepstep.model.events import Event
from keepstep.model.mesh import LEADER

LASTS_NS = 2 * WINDOW_NS
NEW_MESH = (*FRESH, "keeper-started", "mesh")
UNTOLD, ELSEWHERE = "untold", "elsewhere"  # doubts, beside those of core/detection/link_doubts.py


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
class LinkDoubtTold:
    """Why nobody can tell here of some link whether it is slow. `event`: that told it, or since
    when nobody has."""

    doubt: str
    why: str
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
        self._mesh: Event | None = None  # the newest one of this run
        self._doubts: dict[str, Event] = {}
        self._is_told = False  # of this mesh, that a reason is over
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        if event.kind in NEW_MESH:
            self._slow.clear()
            self._damage.clear()
            self._doubts.clear()
            self._is_told = False
            if event.kind != "keeper-started":  # the next one watches the same nodes
                self._mesh = event if event.kind == "mesh" else None
        elif event.kind in ("link-unknown", "link-known"):
            self._take_doubt(event)
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

    def _take_doubt(self, event: Event) -> None:
        doubt = str(event.data.get("doubt", ""))
        self._doubts.pop(doubt, None)
        if event.kind == "link-unknown":
            self._doubts[doubt] = event
        else:
            self._is_told = True

    @property
    def compares_here(self) -> bool:
        """Whether this node's keeper compares the links of several nodes."""
        mesh = self._mesh
        return mesh is not None and _has_links(mesh) and mesh.data.get("node") == LEADER

    def is_silent(self, keeper_alive: bool | None) -> bool:
        """Whether what this node's keeper has told of all links is no news of now. keeper_alive:
        None: it says nothing."""
        return self.compares_here and not keeper_alive

    def doubts(self) -> tuple[LinkDoubtTold, ...]:
        """Nothing where there is one node, or nobody has said how many there are."""
        mesh = self._mesh
        if mesh is None or not _has_links(mesh):
            return ()
        if self._doubts:
            return tuple(
                LinkDoubtTold(doubt, event.why, event)
                for doubt, event in sorted(self._doubts.items())
            )
        if self._is_told:
            return ()
        if self.compares_here:
            why = "the keeper has not told yet that it knows how fast copies go"
            return (LinkDoubtTold(UNTOLD, why, mesh),)
        why = f"the keeper of node {LEADER} compares them, and `keepstep status` there tells"
        return (LinkDoubtTold(ELSEWHERE, why, mesh),)

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


def _has_links(mesh: Event) -> bool:
    nodes = mesh.data.get("nodes")
    return isinstance(nodes, int) and nodes > 1


def _link(event: Event) -> tuple[str, tuple[int, ...]]:
    nodes = event.data.get("nodes")
    named = [node for node in nodes if isinstance(node, int)] if isinstance(nodes, list) else []
    return str(event.data.get("side", "")), tuple(named)
