"""Runs as journals grow are the runs of the whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.economics.goodput import StepTempo, account
from keepstep.dashboard.history import History, by_time
from keepstep.dashboard.timeline import runs_of
from keepstep.model.events import Event
from keepstep.model.units import MS_NS, S_NS
from tests.dashboard.screens import WALL_NS, at

SPOKEN: list[tuple[str, str, dict[str, Any]]] = [
    ("keeper", "keeper-started", {"adopted_slots": 0}),
    ("keeper", "keeper-started", {"adopted_slots": 3}),
    ("agent", "job-started", {}),
    ("keeper", "keeper-listens", {}),
    ("keeper", "rank-joined", {"rank": 0, "pid": 7}),
    ("keeper", "resumed", {"source": "fresh", "step": -1, "epoch": 1, "lost_steps": 0}),
    ("keeper", "resumed", {"source": "memory", "step": 4, "epoch": 2, "lost_steps": 1}),
    ("keeper", "go", {"source": "store", "step": 3, "epoch": 3}),
    ("rank 0", "next-step", {"step": 5, "duration_ns": 9 * MS_NS}),
    ("agent", "rank-exited", {"rank": 1, "code": -9}),
    ("agent", "suspicion", {"rank": 1}),
    ("keeper", "persisted", {"step": 5}),
    ("keeper", "job-over", {"ok": True}),
    ("keeper", "keeper-ended", {}),
]


@st.composite
def journals(draw: st.DrawFn) -> list[Event]:
    said = draw(st.lists(st.sampled_from(SPOKEN), max_size=30))
    return [at(10 * i, who, kind, f"word {i}", **data) for i, (who, kind, data) in enumerate(said)]


@given(journals(), st.lists(st.integers(0, 30), max_size=8), st.booleans())
def test_runs_that_grow_are_the_runs_of_the_whole(
    events: list[Event], cuts: list[int], of_several: bool
) -> None:
    history = History(of_several)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(events)), len(events)]
    for begin, end in pairwise(bounds):
        history.add(events[begin:end])
        assert history.runs == runs_of(events[:end], of_several)


@given(journals())
def test_an_account_is_that_of_its_run(events: list[Event]) -> None:
    history = History()
    history.add(events)
    tempos = [StepTempo(0, 7, 9, 20 * MS_NS, 0)]
    now = (WALL_NS + S_NS, S_NS, "")
    for place, run in enumerate(history.runs):
        is_last = place == len(history.runs) - 1
        want = account(run.events, tempos, now) if is_last else account(run.events)
        for _ in range(2):  # the second time out of what is remembered
            assert history.account(place, tempos, now) == want


def test_nodes_that_begin_after_each_other_are_one_run() -> None:
    """Laid together, the second node's start stands behind the first one's words."""
    first = [
        at(0, "keeper (a)", "keeper-started", "", adopted_slots=0),
        at(5, "agent (a)", "nodes-awaited", "waits"),
        at(40, "keeper (a)", "resumed", "", source="fresh", step=-1, epoch=1),
    ]
    second = [
        at(20, "keeper (b)", "keeper-started", "", adopted_slots=0),
        at(41, "keeper (b)", "go", "", source="fresh", step=-1, epoch=1),
    ]
    together = by_time([*first, *second])
    assert [event.wall_ns for event in together] == sorted(e.wall_ns for e in together)
    assert len(runs_of(together, of_several=True)) == 1
    over = [*together, at(90, "keeper (a)", "job-over", "over", ok=True)]
    again = [at(100, "keeper (a)", "keeper-started", "", adopted_slots=0)]
    fresh = [at(110, "keeper (a)", "resumed", "", source="fresh", step=-1, epoch=9)]
    assert len(runs_of([*over, *again, *fresh], of_several=True)) == 2


def test_nothing_was_ever_written() -> None:
    history = History()
    history.add([])
    assert history.runs == []
    with pytest.raises(IndexError):
        history.account(0, (), None)
