"""Marks of incidents: once each, from a journal as it is written, and never at the training's
expense."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from keepstep.edge.os.journal import FileJournal
from keepstep.integrations.boundary import Boundary
from keepstep.integrations.marks import (
    EVERY_S,
    Incident,
    Marks,
    mlflow_mark,
    tensorboard_mark,
    wandb_mark,
)
from keepstep.runtime.rank.session import Job


class Room:
    """A job's journal, and what was marked."""

    def __init__(self, path: Path) -> None:
        self.journal = FileJournal(path, "keeper")
        self.job = cast(Job, SimpleNamespace(settings=SimpleNamespace(journal_path=path), step=-1))
        self.marked: list[Incident] = []
        self.now_s = 0.0

    def marks(self, mark: Callable[[Incident], None] | None = None) -> Marks:
        return Marks(self.job, mark or self.marked.append, lambda: self.now_s)

    def look(self, marks: Marks) -> list[Incident]:
        self.now_s += EVERY_S
        marks.look()
        marks._thread.submit(lambda: None).result()  # what was handed over before is done
        return self.marked

    def resumes(self, step: int, epoch: int, source: str = "memory", kind: str = "resumed") -> None:
        told = f"every rank has proven step {step}"
        self.journal.record(kind, told, step=step, epoch=epoch, source=source, lost_steps=1)


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path / "journal.jsonl")


def test_a_recovery_is_marked_with_its_cause(room: Room) -> None:
    room.resumes(-1, 1, "fresh")
    marks = room.marks()
    room.journal.record("rank-exited", "rank 1 was killed")
    room.resumes(24, 2)
    told = "rank 1 was killed; every rank has proven step 24"
    assert room.look(marks) == [Incident(24, 1, told)]
    assert len(room.look(marks)) == 1, "and once"


def test_what_brought_this_process_here_is_marked_when_it_begins(room: Room) -> None:
    room.journal.record("rank-exited", "rank 0 was killed")
    room.resumes(9, 2)
    room.job.step = 9  # type: ignore[misc]
    assert [mark.step for mark in room.look(room.marks())] == [9]


@pytest.mark.parametrize(("rank", "marked"), [(0, 1), (1, 0)])
def test_rank_0_of_a_librarys_loop_marks_from_the_first_step_on(
    room: Room, monkeypatch: pytest.MonkeyPatch, rank: int, marked: int
) -> None:
    room.resumes(9, 2)
    room.job.step, room.job.rank = 9, rank  # type: ignore[misc]
    for name in ("places_own_data", "step_begin", "step_end"):
        setattr(room.job, name, lambda *_: None)
    boundary = Boundary(room.job, room.marked.append)
    assert room.marked == [], "the library has not begun its trackers"
    boundary.reached()
    if boundary._marks is not None:
        room.look(boundary._marks)
    assert len(room.marked) == marked
    boundary.reached(is_last=True)


def test_a_fresh_start_is_no_incident(room: Room) -> None:
    marks = room.marks()
    room.resumes(-1, 1, "fresh")
    assert room.look(marks) == []


def test_several_nodes_keepers_say_it_and_it_is_one(room: Room) -> None:
    marks = room.marks()
    room.resumes(7, 2)
    room.resumes(7, 2, kind="go")
    room.resumes(7, 3)
    assert [mark.step for mark in room.look(marks)] == [7, 7]


def test_between_two_looks_it_reads_nothing(room: Room) -> None:
    marks = room.marks()
    room.resumes(7, 2)
    marks.look()
    assert room.marked == []


def test_a_tracker_that_fails_costs_a_line(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    def refuses(incident: Incident) -> None:
        raise ConnectionError("away")

    marks = room.marks(refuses)
    room.resumes(7, 2)
    with caplog.at_level(logging.WARNING, "keepstep"):
        room.look(marks)
    assert "away" in caplog.text and "KS5106" in caplog.text


class Tracker:
    """Takes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *words, **named: self.calls.append((name, words, named))


INCIDENT = Incident(24, 1, "rank 1 was killed")


def test_no_tracker_hears_of_a_number_that_nobody_knows() -> None:
    writer, run, flow = Tracker(), Tracker(), Tracker()
    for mark in (tensorboard_mark(writer), wandb_mark(run), mlflow_mark(flow)):
        mark(Incident(24, None, "an unknown number of completed steps lost, perhaps none"))
        assert "keepstep/lost_steps" not in str((writer.calls, run.calls, flow.calls))
    assert writer.calls and run.calls and flow.calls


def test_each_tracker_is_told_in_its_words() -> None:
    writer, run, flow = Tracker(), Tracker(), Tracker()
    tensorboard_mark(writer)(INCIDENT)
    assert ("add_scalar", ("keepstep/lost_steps", 1, 24), {}) in writer.calls
    assert ("add_text", ("keepstep/incident", INCIDENT.text, 24), {}) in writer.calls
    wandb_mark(run, alerts=True)(INCIDENT)
    assert [name for name, _, _ in run.calls] == ["log", "alert"]
    assert run.calls[0][1][0]["keepstep/resumed_step"] == 24
    mlflow_mark(flow)(INCIDENT)
    assert ("log_metric", ("keepstep/lost_steps", 1), {"step": 24}) in flow.calls


def test_tensorboard_takes_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    tensorboard_mark(writer)(INCIDENT)
    writer.close()
    assert any(b"rank 1 was killed" in path.read_bytes() for path in tmp_path.iterdir())
