"""Nodes: what a job's leading keeper last told about all its nodes, and whether that can still be
believed on this one.

Comes in: `nodes.json` of the job directory, this node's journal, which ranks live here, the time.
Goes out: frozen values a screen can show. Asks no other node anything.

Invariant: an old word is shown with its age; where something happened since that it cannot know of,
`doubt` says what, and nothing is concluded from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import FILE, read_node_safety
from keepstep.model.events import Event
from keepstep.model.horizon import Horizon
from keepstep.model.mesh import LEADER

NOT_TOLD = "the leading keeper has told nothing yet"


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node: `ranks` are those that live there; `linked`: whether the leader's link to its keeper
    was open."""

    node: int
    host: str
    rack: str | None
    ranks: tuple[int, ...]
    linked: bool


@dataclass(frozen=True, slots=True)
class NodesView:
    """The leader's answer to "which nodes can I lose right now?" (core/redundancy/survival.py:
    `Losable`), for `step`. All of it is None or empty before the first answer. `here`: this node.
    `told_age_ns`: since when the answer has been this one."""

    policy: str | None = None
    policy_why: str = ""
    step: int | None = None
    is_committed: bool = False
    nodes: tuple[NodeRow, ...] = ()
    here: int | None = None
    safe: tuple[int, ...] = ()
    critical: Mapping[int, tuple[int, ...]] | None = None
    out_of_reach: tuple[int, ...] = ()
    any_nodes: int | None = None
    why: str = ""
    told_age_ns: int | None = None
    doubt: str = NOT_TOLD


def leaders_word(job_dir: Path, epoch: int) -> Horizon | None:
    """The last one of this epoch, as this node's keeper has heard it; None when there is no page: a
    job of one node."""
    try:
        page = HorizonPage(MEMORY, job_dir, make=False)
    except (OSError, ValueError):
        return None
    try:
        return page.read(epoch)
    finally:
        page.close()


def nodes_view(
    job_dir: Path,
    ranks_here: Collection[int],
    keeper_alive: bool,
    events: Sequence[Event],
    now_wall_ns: int,
) -> NodesView:
    """What this node knows of all nodes."""
    told = read_node_safety(MEMORY, job_dir)
    try:
        told_ns = (job_dir / FILE).stat().st_mtime_ns
        return (
            _view(
                told,
                ranks_here,
                max(0, now_wall_ns - told_ns),
                _doubt(keeper_alive, told_ns, events),
            )
            if told
            else NodesView()
        )
    except (OSError, KeyError, TypeError, ValueError):  # gone this moment, or of another release
        return NodesView()


def _view(
    told: Mapping[str, Any], ranks_here: Collection[int], age_ns: int, doubt: str
) -> NodesView:
    rows, first = [], 0
    for n in told["nodes"]:
        rows.append(
            NodeRow(
                int(n["node"]),
                str(n["host"]),
                n["rack"],
                tuple(range(first, first + n["ranks"])),
                bool(n["linked"]),
            )
        )
        first += n["ranks"]
    return NodesView(
        policy=str(told["policy"]),
        policy_why=str(told["policy_why"]),
        step=None if told["step"] is None else int(told["step"]),
        is_committed=bool(told["is_committed"]),
        nodes=tuple(rows),
        here=next((row.node for row in rows if set(row.ranks) & set(ranks_here)), None),
        safe=tuple(told["safe"]),
        critical={int(node): tuple(owners) for node, owners in told["critical"].items()},
        out_of_reach=tuple(told["out_of_reach"]),
        any_nodes=int(told["any_nodes"]),
        why=str(told["why"]),
        told_age_ns=age_ns,
        doubt=doubt,
    )


def _doubt(keeper_alive: bool, told_ns: int, events: Sequence[Event]) -> str:
    """What makes the word worthless; empty when nothing does. A leader that falls silent is missed
    by the keeper here, which says so."""
    if not keeper_alive:
        return "no keeper lives here that would hear of a change"
    since = [e for e in events if e.wall_ns > told_ns]
    if any(e.kind == "mesh" for e in since):
        return "another mesh has begun since, and its leader has not told yet"
    lost = next(
        (e for e in reversed(since) if e.kind == "node-lost" and e.data.get("node") == LEADER), None
    )
    return f"{lost.why}; it leads" if lost else ""
