"""A job that is looked at again and again is the job that one look sees."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.config import Settings
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.job_look import HEADERS_EVERY_NS, JobLook
from keepstep.dashboard.journals import Journals, find_journals, jobs_below, labels_of
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.view import JobView, job_view
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.shm.slot import slot_path
from keepstep.model.snapshot import SlotState, SlotView, Stamp
from keepstep.model.units import S_NS
from tests.dashboard.test_view import hold_as_keeper, make_rank, make_slot, places  # noqa: F401


def job_of(places: Settings) -> FoundJob:  # noqa: F811
    return FoundJob("demo", places.job_dir, places.journal_path, places.job_dir.is_dir(), 0)


def seen(view: JobView) -> dict[str, Any]:
    """All that is not said of single slots, which carry less when they are told by their ranks."""
    said = asdict(replace(view, slots=()))
    slots = [(s.rank, s.slot, s.state, s.step, s.epoch, s.age_ns) for s in view.slots]
    return {**said, "slots": [slot for slot in slots if slot[2] != "empty"]}


def test_it_sees_what_one_look_sees_as_the_job_goes_on(places: Settings) -> None:  # noqa: F811
    journal = FileJournal(places.journal_path, "keeper")
    pages = [make_rank(places, rank, [6, 7, 8], writing=9, step=9) for rank in range(2)]
    keeper = hold_as_keeper(places, CLOCK.boot())
    looking = JobLook(job_of(places))

    def check() -> JobView:
        now = Moment.now()
        view = looking.view(now)
        assert seen(view) == seen(job_view(job_of(places), now))
        return view

    assert check().state == "training"
    journal.record("job-started", "begins")
    journal.record("resumed", "afresh", source="fresh", step=-1, epoch=1, lost_steps=0)
    assert looking.has_news() and check().account is not None and not looking.has_news()
    make_slot(places, 0, 0, 10)
    slots = (*[SlotView(SlotState.SEALED, Stamp(step, 1)) for step in (10, 7, 8)],)
    pages[0].publish(slots=(*slots, SlotView(SlotState.WRITING, Stamp(9, 1))), completed_step=10)
    assert check().ranks[0].newest_step == 10
    pages[1].close()
    assert check().state == "broken"
    journal.record("rank-exited", "rank 1 was killed", rank=1, code=-9)
    assert check().incident is not None
    pages[0].close()
    os.close(keeper)
    assert check().state == "left-over"
    journal.close()
    looking.close()


def test_a_damaged_header_is_seen_when_all_are_read(places: Settings) -> None:  # noqa: F811
    page = make_rank(places, 0, [7])
    looking = JobLook(job_of(places))
    now = Moment.now()
    assert looking.view(now).slots[0].state == "sealed"
    path = slot_path(places.job_dir, 0, 0)
    raw = bytearray(path.read_bytes())
    raw[100] ^= 4
    path.write_bytes(raw)
    assert looking.view(now).slots[0].state == "sealed"
    later = replace(now, mono_ns=now.mono_ns + HEADERS_EVERY_NS)
    assert looking.view(later).slots[0].state == "damaged"
    page.close()
    looking.close()


def test_it_outlives_the_job(places: Settings) -> None:  # noqa: F811
    page = make_rank(places, 0, [7])
    looking = JobLook(job_of(places))
    looking.view(Moment.now())
    page.close()
    for path in sorted(places.job_dir.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    places.job_dir.rmdir()
    view = looking.view(Moment.now())
    assert (view.state, view.ranks, view.slots, view.job_dir) == ("ended", (), (), None)
    looking.close()


def test_an_age_is_that_of_the_header(places: Settings) -> None:  # noqa: F811
    page = make_rank(places, 0, [7])
    looking = JobLook(job_of(places))
    now = Moment.now()
    later = Moment(now.wall_ns + 5 * S_NS, now.mono_ns + 5 * S_NS, now.boot)
    first, second = looking.view(now).ranks[0], looking.view(later).ranks[0]
    assert first.newest_age_ns is not None and second.newest_age_ns is not None
    assert second.newest_age_ns - first.newest_age_ns == 5 * S_NS
    page.close()
    looking.close()


# -- journals of several nodes


def write(path: Path, who: str, *said: str) -> None:
    journal = FileJournal(path, who)
    for why in said:
        journal.record("plan", why)
    journal.close()


def test_journals_of_several_nodes_are_one_line_of_time(tmp_path: Path) -> None:
    paths = [tmp_path / f"node-{n}" / "state" / "demo" / "journal.jsonl" for n in range(2)]
    write(paths[0], "agent", "first")
    write(paths[1], "agent", "second")
    write(paths[0], "rank 0", "third")
    assert find_journals(tmp_path, "demo") == paths and jobs_below(tmp_path) == ["demo"]
    read = Journals([*paths, paths[0]])
    assert read.are_several
    told = [(event.who, event.why) for event in read.read()]
    assert told == [
        ("agent (node-0)", "first"),
        ("agent (node-1)", "second"),
        ("rank 0", "third"),
    ]
    assert not read.have_grown() and read.read() == []
    write(paths[1], "keeper", "fourth")
    assert read.have_grown() and [e.who for e in read.read()] == ["keeper (node-1)"]


def test_a_journal_that_lies_there_twice_counts_once(tmp_path: Path) -> None:
    path, copied = (tmp_path / node / "demo" / "journal.jsonl" for node in ("own", "copied"))
    write(path, "agent", "first", "second")
    copied.parent.mkdir(parents=True)
    copied.write_bytes(path.read_bytes())
    assert [event.why for event in Journals([path, copied]).read()] == ["first", "second"]


def test_one_journal_keeps_its_names(tmp_path: Path) -> None:
    path = tmp_path / "demo" / "journal.jsonl"
    read = Journals([path])
    assert not read.are_several and read.read() == []
    write(path, "agent", "first")
    assert [event.who for event in read.read()] == ["agent"]


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["/a/j/x"], [""]),
        (["/a/n0/j/x", "/a/n1/j/x"], ["n0", "n1"]),
        (["/a/j/one", "/a/j/two"], ["one", "two"]),
        (["/a/x", "/a/n1/x"], ["x", "n1"]),
    ],
)
def test_nodes_are_told_apart_by_where_their_journals_lie(
    paths: list[str], labels: list[str]
) -> None:
    assert labels_of([Path(path) for path in paths]) == labels


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users are played")
def test_of_a_jobs_own_directory_only_its_owners_word_counts(tmp_path: Path) -> None:
    paths = [tmp_path / "state" / "demo" / "journal.jsonl", tmp_path / "named" / "journal.jsonl"]
    for path in paths:
        journal = FileJournal(path, "keeper")
        journal.record("one", path.parent.name)
        journal.close()
        os.chown(path, 65534, 65534)
    assert [event.why for event in Journals(paths, os.geteuid()).read()] == ["named"]
    assert len(Journals(paths).read()) == 2
