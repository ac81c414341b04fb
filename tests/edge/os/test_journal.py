"""Journals: every whole event comes back in order, whoever wrote it; nothing depends on being able
to write."""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep.edge.os.journal import FileJournal, JournalTail, read_journal


def test_events_come_back_in_order_from_all_writers(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "journal.jsonl"
    rank, keeper = FileJournal(path, "rank 0"), FileJournal(path, "keeper")
    rank.record("skipped", "step 3 is not captured: because", step=3)
    keeper.record("damaged", "slot 1 is damaged")
    rank.close()
    keeper.close()
    events = list(read_journal(path))
    assert [(e.who, e.kind, e.why, e.data) for e in events] == [
        ("rank 0", "skipped", "step 3 is not captured: because", {"step": 3}),
        ("keeper", "damaged", "slot 1 is damaged", {}),
    ]
    assert events[0].mono_ns <= events[1].mono_ns and events[0].wall_ns > 0
    assert path.stat().st_mode & 0o777 == 0o600


def test_writers_do_not_interleave(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"

    def write(who: str) -> None:
        journal = FileJournal(path, who)
        for number in range(200):
            journal.record("tick", who * 200, number=number)
        journal.close()

    writers = [threading.Thread(target=write, args=(who,)) for who in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    events = list(read_journal(path))
    assert len(events) == 600
    for who in "abc":
        assert [e.data["number"] for e in events if e.who == who] == list(range(200))


def test_the_log_hears_the_same_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = FileJournal(tmp_path / "j", "rank 2")
    with caplog.at_level(logging.INFO, "keepstep"):
        journal.record("torn", "step 4 was torn", step=4)
    journal.close()
    [record] = caplog.records
    assert record.getMessage() == "rank 2: step 4 was torn"
    assert (record.__dict__["keepstep_kind"], record.__dict__["keepstep_data"]) == (
        "torn",
        {"step": 4},
    )


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = FileJournal(path, "rank 0")
    journal.record("one", "1")
    journal.record("two", "2")
    whole = path.read_bytes()
    first_ends = whole.index(b"\n") + 1
    for torn_at in range(first_ends, len(whole) - 1):
        path.write_bytes(whole[:torn_at])  # the crash; O_APPEND writes at the new end
        journal.record("three", "3")
        assert [e.kind for e in read_journal(path)] == ["one", "three"]
    journal.close()


def test_foreign_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"\n{}\n\xff\xfe\nhello\n")
    journal = FileJournal(path, "rank 0")
    journal.record("one", "1")
    journal.close()
    assert [e.kind for e in read_journal(path)] == ["one"]


def test_no_journal_reads_as_no_events(tmp_path: Path) -> None:
    assert list(read_journal(tmp_path / "missing")) == []


def test_without_a_place_events_reach_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    journal = FileJournal(blocker / "journal.jsonl", "rank 0")
    with caplog.at_level(logging.INFO, "keepstep"):
        journal.record("one", "the sentence")
    journal.close()
    assert "cannot be written" in caplog.text and "rank 0: the sentence" in caplog.text


def test_a_full_disk_costs_events_not_the_trainer_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stays full, or takes half of a line, is not told with each event: there are
    thousands."""
    path, write = tmp_path / "journal.jsonl", os.write
    journal = FileJournal(path, "rank 0")

    def full(fd: int, line: bytes) -> int:
        raise OSError(28, "No space left on device")

    journal.record("first", "it is written")
    for each in (full, lambda fd, line: write(fd, line[:20]), full):
        monkeypatch.setattr(os, "write", each)
        journal.record("lost", "the sentence")
    monkeypatch.undo()
    for kind in ("second", "third"):
        journal.record(kind, "it is written")
    journal.close()
    told = [record.getMessage() for record in caplog.records if "KS5225" in record.getMessage()]
    assert len(told) == 2 and "lost an event" in told[0] and "No space left" in told[0]
    assert str(path) in told[0] and "lost 3 of this process's events" in told[1]
    assert [event.kind for event in read_journal(path)] == ["first", "second", "third"]


def test_a_tail_tells_what_was_added_and_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    tail = JournalTail(path)
    assert tail.read() == []
    journal = FileJournal(path, "rank 0")
    journal.record("one", "1", kind="data may have a field of that name")
    assert [(e.kind, e.data) for e in tail.read()] == [
        ("one", {"kind": "data may have a field of that name"})
    ]
    assert tail.read() == []
    journal.record("two", "2")
    with open(path, "a") as file:
        # its writer is in the middle of it
        file.write('{"wall_ns":1,"mono_ns":2,"who":"w","kind":"three","why":"')
    assert [e.kind for e in JournalTail(path, from_its_end=True).read()] == []
    assert [e.kind for e in tail.read()] == ["two"]
    with open(path, "a") as file:
        file.write('3","data":{}}\n')
    assert [e.kind for e in tail.read()] == ["three"]
    path.write_text("")
    journal.record("four", "4")
    assert [e.kind for e in tail.read()] == ["four"]


@pytest.mark.parametrize(
    ("kind", "why", "level", "ends"),
    [
        ("waiting", "for others", logging.WARNING, "for others [KS5211]"),
        ("caveat", "a: what was saved holds", logging.WARNING, "holds [KS5004]"),
        ("caveat", "anything", logging.ERROR, "anything [KS5000]"),
        ("waiting", "for others", logging.INFO, "for others"),
        ("job-ended", "no keeper [KS3001]", logging.ERROR, "no keeper [KS3001]"),
    ],
)
def test_what_is_wrong_ends_with_its_code_in_the_log_and_not_in_the_journal(
    kind: str, why: str, level: int, ends: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.jsonl"
    with caplog.at_level(logging.DEBUG, "keepstep"):
        FileJournal(path, "rank 0").record(kind, why, level)
    assert caplog.messages[-1].endswith(ends)
    assert [event.why for event in read_journal(path)] == [why]


def test_a_pipe_at_its_place_holds_nobody(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    os.mkfifo(path)
    assert list(read_journal(path)) == [] and JournalTail(path).read() == []
    path.unlink()
    path.mkdir()
    assert list(read_journal(path)) == [] and JournalTail(path).read() == []


EVE = 65534


def another_users(path: Path) -> None:
    os.chown(path, EVE, EVE)


def of_another_job(path: Path) -> None:
    other = path.parent.parent / "other" / path.name
    other.parent.mkdir()
    path.rename(other)
    path.symlink_to(other)


def a_directory_of_another_job(path: Path) -> None:
    path.parent.rename(path.parent.with_name("other"))
    path.parent.symlink_to("other")


NOT_OURS: dict[str, Callable[[Path], None]] = {
    "another user's file": another_users,
    "another user's directory": lambda path: another_users(path.parent),
    "a link": of_another_job,
    "a link to a directory": a_directory_of_another_job,
}


@pytest.mark.parametrize("what", NOT_OURS)
def test_what_another_user_has_put_there_is_nobodys_word(what: str, tmp_path: Path) -> None:
    """In a shared state directory who comes first makes the job's directory."""
    if os.geteuid() != 0 and "user" in what:
        pytest.skip("needs root: only root can give a file away")
    path = tmp_path / "job" / "journal.jsonl"
    journal = FileJournal(path, "rank 0")
    journal.record("one", "1")
    journal.close()
    mine = os.geteuid()
    tail = JournalTail(path, owner=mine)
    assert [e.kind for e in read_journal(path, mine)] == ["one"]
    NOT_OURS[what](path)
    assert list(read_journal(path, mine)) == [] and tail.read() == []
    assert [e.kind for e in read_journal(path)] == ["one"], "a person has named it"
    if what == "another user's file":
        another_users(path.parent)
        assert [e.kind for e in read_journal(path, EVE)] == ["one"]


@contextmanager
def little_memory(more_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + more_bytes, -1))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_line_without_an_end_takes_no_memory_and_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = FileJournal(path, "rank 0")
    journal.record("one", "1")
    os.truncate(path, 1 << 30)  # a hole
    journal.record("two", "2")
    journal.close()
    tail = JournalTail(path)
    with little_memory(256 << 20):
        assert [e.kind for e in read_journal(path)] == ["one", "two"]
        assert [e.kind for e in tail.read()] == ["one", "two"] and tail.read() == []
