"""What would survive which loss."""

from __future__ import annotations

import pytest

from keepstep.dashboard.moment import Moment
from keepstep.dashboard.nodes import NodesView
from keepstep.dashboard.protection import (
    CheckpointView,
    ProtectionRow,
    newest_checkpoint,
    of_one_node,
    of_several_nodes,
)
from keepstep.edge.shm.status_page import BLANK
from keepstep.model.events import Event
from keepstep.model.snapshot import RankStatus, SlotState, SlotView, Stamp
from keepstep.model.units import S_NS

STORED = CheckpointView(30, 5 * S_NS)
HORIZON = Stamp(41, 2)
SAFE = NodesView(policy="copies:2", step=41, is_committed=True, any_nodes=1, doubt="", why="any")


def steps(rows: tuple[ProtectionRow, ...]) -> dict[str, int | None]:
    return {row.against: row.step for row in rows}


def holder(*held: int) -> RankStatus:
    """A rank that has these steps sealed."""
    slots = tuple(SlotView(SlotState.SEALED, Stamp(step, 2)) for step in held)
    return BLANK._replace(slots=slots)


@pytest.mark.parametrize(
    ("held", "checkpoint", "expected"),
    [
        ([40, 41], STORED, (41, 40, 30)),
        ([40, 41], None, (41, 40, None)),
        ([41], STORED, (41, 30, 30)),
        ([41], None, (41, None, None)),
    ],
)
def test_of_one_node(
    held: list[int], checkpoint: CheckpointView | None, expected: tuple[int | None, ...]
) -> None:
    rows = of_one_node([holder(*held), holder(*held)], HORIZON, 7, checkpoint)
    assert tuple(steps(rows).values()) == expected
    assert rows[0].age_ns == 7 and all(row.is_known for row in rows)


def test_of_one_node_before_the_first_step() -> None:
    assert set(steps(of_one_node([], None, None, STORED)).values()) == {30}
    assert set(steps(of_one_node([], None, None, None)).values()) == {None}


@pytest.mark.parametrize("checkpoint", [None, STORED])
def test_of_several_nodes(checkpoint: CheckpointView | None) -> None:
    stored = checkpoint.step if checkpoint else None
    safe = of_several_nodes(SAFE, HORIZON, 7, checkpoint)
    assert list(steps(safe).values()) == [41, 41, 41, stored]
    assert [row.age_ns for row in safe[:3]] == [7, 7, 7]
    bare = NodesView(policy="none", step=41, is_committed=True, any_nodes=0, doubt="")
    assert list(steps(of_several_nodes(bare, HORIZON, 7, checkpoint)).values()) == [
        41,
        stored,
        stored,
        stored,
    ]


def test_a_report_in_doubt_says_nothing_of_nodes() -> None:
    doubtful = NodesView(policy="copies:2", step=41, any_nodes=1, doubt="the leader is away")
    killed, damaged, lost, everything = of_several_nodes(doubtful, HORIZON, 7, STORED)
    assert (killed.step, killed.is_known, everything.step) == (41, True, 30)
    assert not damaged.is_known and not lost.is_known and lost.why == "the leader is away"
    unknown = of_several_nodes(doubtful, None, None, None)[0]
    assert (unknown.step, unknown.is_known) == (None, False)
    assert of_several_nodes(doubtful, None, None, STORED)[0].step == 30


def test_the_newest_checkpoint_is_the_last_that_is_not_damaged() -> None:
    def event(at_s: int, kind: str, step: int) -> Event:
        return Event(at_s * S_NS, at_s * S_NS, "keeper", kind, "", {"step": step})

    now = Moment(100 * S_NS, 100 * S_NS)
    written = [event(10, "persisted", 5), event(20, "persisted", 9)]
    assert newest_checkpoint([], now) is None
    assert newest_checkpoint(written, now) == CheckpointView(9, 80 * S_NS)
    damaged = [*written, event(30, "checkpoint-damaged", 9)]
    assert newest_checkpoint(damaged, now) == CheckpointView(5, 90 * S_NS)
    assert newest_checkpoint([*damaged, event(40, "persisted", 9)], now) == CheckpointView(
        9, 60 * S_NS
    )
