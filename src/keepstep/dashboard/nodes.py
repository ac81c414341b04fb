"""Nodes: what a job's leading keeper last reported of all its nodes, and whether this node can rely
on it.

Comes in: `nodes.json` of the job directory, this node's journal, which ranks live here, the time.
Goes out: frozen values that a screen can show. Asks no other node.

Invariant: an old report is shown with its age. Where something has happened since that it cannot
know of, `doubt` says what, and nothing is concluded from the report.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.keeper_look import KeeperLook
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import FILE, read_node_safety
from keepstep.model.events import Event
from keepstep.model.horizon import Horizon
from keepstep.model.mesh import LEADER

NO_REPORT = "the leading keeper has not reported yet"


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node. `ranks`: those that live there. `linked`: the leading keeper's link to it was
    open."""

    node: int
    host: str
    rack: str | None
    ranks: tuple[int, ...]
    linked: bool


@dataclass(frozen=True, slots=True)
class NodesView:
    """The leader's answer to "which nodes may be lost right now?" (`Losable` in
    core/redundancy/survival.py), for `step`.

    All of it is None or empty before the first report. here: this node. told_age_ns: how long the
    report has been this one. doubt: why it cannot be relied on; empty if it can.
    """

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
    doubt: str = NO_REPORT


def leaders_word(job_dir: Path, epoch: int) -> Horizon | None:
    """What the leading keeper last said in this epoch, as the keeper here has received it. None
    when there is no such page: a job of one node."""
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
    keeper: KeeperLook,
    events: Sequence[Event],
    now_wall_ns: int,
) -> NodesView:
    """What this node knows of all nodes."""
    report = read_node_safety(MEMORY, job_dir)
    if not report:
        return NodesView()
    try:
        told_ns = (job_dir / FILE).stat().st_mtime_ns
        doubt = _doubt(keeper, told_ns, events)
        return _view(report, ranks_here, max(0, now_wall_ns - told_ns), doubt)
    except (OSError, KeyError, TypeError, ValueError):  # gone this moment, or of another release
        return NodesView()


def _view(
    told: Mapping[str, Any], ranks_here: Collection[int], age_ns: int, doubt: str
) -> NodesView:
    rows: list[NodeRow] = []
    first = 0
    for node in told["nodes"]:
        row = NodeRow(
            node=int(node["node"]),
            host=str(node["host"]),
            rack=node["rack"],
            ranks=tuple(range(first, first + node["ranks"])),
            linked=bool(node["linked"]),
        )
        rows.append(row)
        first += node["ranks"]
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


def _doubt(keeper: KeeperLook, told_ns: int, events: Sequence[Event]) -> str:
    """Why the report cannot be relied on; empty if it can. When the leader falls silent, the keeper
    here notices and says so in the journal."""
    if keeper.alive is None:
        return "the keeper here says nothing, so nobody knows whether it receives changes"
    if not keeper.alive:
        return "no keeper is alive here to receive changes"
    since = [event for event in events if event.wall_ns > told_ns]
    if any(event.kind == "mesh" for event in since):
        return "the nodes have regrouped since, and their new leader has not reported yet"
    for event in reversed(since):
        if event.kind == "node-lost" and event.data.get("node") == LEADER:
            return f"{event.why}; it is the leading node"
    return ""
