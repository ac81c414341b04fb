"""Protection: what would survive which loss, at this moment.

Comes in: what the ranks hold, what the leading keeper says of the nodes, the newest checkpoint.
Goes out: one row for each kind of loss. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepstep.core.economics.journal_kinds import number
from keepstep.core.resume.cut import common, holding_of
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.nodes import NodesView
from keepstep.model.events import Event
from keepstep.model.snapshot import RankStatus, Stamp


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """The newest checkpoint that the journal tells of."""

    step: int
    age_ns: int


@dataclass(frozen=True, slots=True)
class ProtectionRow:
    """What would survive `against`: `step`, `age_ns` old, and `why`. `step` None: nothing, or,
    unless `is_known`, nobody can tell here."""

    against: str
    step: int | None
    age_ns: int | None
    why: str
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class _StateSource:
    """A row without the loss that it is about."""

    step: int | None
    age_ns: int | None
    why: str
    is_known: bool = True

    def against(self, loss: str) -> ProtectionRow:
        return ProtectionRow(loss, self.step, self.age_ns, self.why, self.is_known)


def newest_checkpoint(events: Iterable[Event], now: Moment) -> CheckpointView | None:
    """The last one written, of those that were not found damaged since."""
    written: dict[int, int] = {}
    for event in events:
        step = number(event.data.get("step"))
        if step is not None and event.kind in ("persisted", "checkpoint-damaged"):
            written.pop(step, None)  # also so that the newest is the last in order
            if event.kind == "persisted":
                written[step] = event.wall_ns
    if not written:
        return None
    step, wall_ns = list(written.items())[-1]
    return CheckpointView(step, max(0, now.wall_ns - wall_ns))


def of_one_node(
    statuses: Iterable[RankStatus],
    horizon: Stamp | None,
    age_ns: int | None,
    checkpoint: CheckpointView | None,
) -> tuple[ProtectionRow, ...]:
    """Of a job of one node. `horizon`: the newest step that every rank holds, for `age_ns`."""
    stored = _stored(checkpoint)
    killed = damaged = stored
    if horizon is not None:
        killed = _StateSource(horizon.step, age_ns, "every rank holds it in memory")
        held = common([holding_of(status).sealed for status in statuses])
        older = max((stamp for stamp in held if stamp != horizon), default=None)
        if older is not None:
            damaged = _StateSource(older.step, None, "every rank holds it in memory too")
    elif checkpoint is None:
        nothing = "no step is held by every rank, and there is no checkpoint in the store"
        killed = damaged = _StateSource(None, None, nothing)
    return (
        killed.against("a killed process"),
        damaged.against("a damaged snapshot"),
        stored.against("a lost machine"),
    )


def of_several_nodes(
    nodes: NodesView,
    horizon: Stamp | None,
    age_ns: int | None,
    checkpoint: CheckpointView | None,
) -> tuple[ProtectionRow, ...]:
    """Of a job of several nodes. `horizon`: the newest committed step, held here for `age_ns`.

    Where a node may be lost, one of its snapshots may be damaged: both come back in the same way.
    """
    stored = _stored(checkpoint)
    lost, damaged = _lost_node(nodes, horizon, age_ns, stored)
    return (
        _killed_process(nodes, horizon, age_ns, checkpoint).against("a killed process"),
        damaged.against("a damaged snapshot"),
        lost.against("a lost node"),
        stored.against("all nodes lost"),
    )


def _stored(checkpoint: CheckpointView | None) -> _StateSource:
    if checkpoint is None:
        return _StateSource(None, None, "no checkpoint in the store")
    return _StateSource(checkpoint.step, checkpoint.age_ns, "checkpoint in the store")


def _killed_process(
    nodes: NodesView,
    horizon: Stamp | None,
    age_ns: int | None,
    checkpoint: CheckpointView | None,
) -> _StateSource:
    if horizon is not None:
        committed = "committed: every rank holds it in memory, or other nodes give it back"
        return _StateSource(horizon.step, age_ns, committed)
    if not nodes.doubt and nodes.step is not None:
        return _StateSource(nodes.step, None, "every rank of every node holds it in memory")
    if checkpoint is not None:
        return _stored(checkpoint)
    return _StateSource(None, None, "no committed step is known here yet", is_known=False)


def _lost_node(
    nodes: NodesView, horizon: Stamp | None, age_ns: int | None, stored: _StateSource
) -> tuple[_StateSource, _StateSource]:
    """What survives the loss of a node, and the damage of one snapshot."""
    if nodes.doubt:
        unknown = _StateSource(None, None, nodes.doubt, is_known=False)
        return unknown, unknown
    if nodes.step is None:
        early = _instead(stored, "no step is held by every rank yet")
        return early, early
    if (nodes.any_nodes or 0) <= 0:
        apart = f"not every snapshot has a part on another node ({nodes.policy})"
        return _instead(stored, "not every node may be lost"), _instead(stored, apart)
    is_horizon = horizon is not None and horizon.step == nodes.step
    known_age_ns = age_ns if is_horizon else None
    whole = f"the other nodes give it back ({nodes.policy})"
    return (
        _StateSource(nodes.step, known_age_ns, nodes.why),
        _StateSource(nodes.step, known_age_ns, whole),
    )


def _instead(stored: _StateSource, why: str) -> _StateSource:
    return _StateSource(stored.step, stored.age_ns, f"{why}; {stored.why}")
