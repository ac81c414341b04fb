"""The page of a rank's steps: what was written is read; what is overwritten reads as nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.step_work_page import (
    RECORDS,
    StepWorkReader,
    StepWorkWriter,
    work_path,
)
from keepstep.model.step_work import (
    MOST_GROUPS,
    GroupEntries,
    Section,
    StepWork,
    Timing,
    WorkBlock,
    block_between,
)

COUNTS = st.integers(0, 1 << 60)
SECTIONS = st.lists(COUNTS, min_size=len(Section), max_size=len(Section)).map(tuple)


def work(step: int, epoch: int = 1) -> StepWork:
    five = tuple(range(step, step + len(Section)))
    return StepWork(step, epoch, 10 * step, five, five, step, five, 2 * step, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = work_path(tmp_path, 3)
    found.parent.mkdir()
    return found


@pytest.fixture
def writer(path: Path) -> Iterator[StepWorkWriter]:
    made = StepWorkWriter(MEMORY, path)
    made.begin(Timing.HOST)
    yield made
    made.close()


SUMS = [SECTIONS, SECTIONS, COUNTS, SECTIONS, *[COUNTS] * 3, SECTIONS]
GROUPS = st.lists(
    st.builds(GroupEntries, st.integers(1, 1 << 48), COUNTS, COUNTS), max_size=MOST_GROUPS
).map(tuple)


@given(st.builds(StepWork, COUNTS, COUNTS, st.just(1 << 60), *SUMS, GROUPS))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, written: StepWork
) -> None:
    path = tmp_path_factory.mktemp("page") / "work"
    page = StepWorkWriter(MEMORY, path)
    page.begin(Timing.DEVICE)
    page.write(written)
    reader = StepWorkReader(MEMORY, path)
    assert reader.newest() == written == reader.at(written.step, written)
    assert reader.timing is Timing.DEVICE
    reader.close()
    page.close()


def test_older_steps_are_there_until_they_are_overwritten(
    path: Path, writer: StepWorkWriter
) -> None:
    reader = StepWorkReader(MEMORY, path)
    assert reader.newest() is None and reader.timing is Timing.HOST
    last = 3 * RECORDS + 17
    for step in range(5, last + 1):
        writer.write(work(step))
    newest = reader.newest()
    assert newest == work(last)
    assert reader.at(last - 500, newest) == work(last - 500)
    assert reader.at(last - RECORDS, newest) is None and reader.at(last + 1, newest) is None
    reader.close()


def test_a_step_that_was_done_twice_is_not_taken_for_another(
    path: Path, writer: StepWorkWriter
) -> None:
    reader = StepWorkReader(MEMORY, path)
    for step, epoch in [(0, 1), (1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2)]:
        writer.write(work(step, epoch))
    newest = reader.newest()
    assert newest == work(4, 2)
    assert reader.at(2, newest) == work(2, 2)
    assert reader.at(1, newest) is None, "that place has a step of another epoch"
    assert reader.at(3, work(3, 1)) is None, "of another life"
    reader.close()


def test_another_life_begins_anew(path: Path, writer: StepWorkWriter) -> None:
    writer.write(work(9))
    reader = StepWorkReader(MEMORY, path)
    again = StepWorkWriter(MEMORY, path)
    again.begin(Timing.HOST)
    assert reader.newest() is None and reader.is_there()
    again.write(work(3, 2))
    assert reader.newest() == work(3, 2)
    again.close()
    again.write(work(4, 2))
    assert reader.newest() == work(3, 2), "a closed page is written no more"
    path.unlink()
    assert not reader.is_there()
    reader.close()


def test_a_page_that_is_written_over_is_none_any_more(path: Path, writer: StepWorkWriter) -> None:
    reader = StepWorkReader(MEMORY, path)
    assert reader.is_there()
    raw = path.read_bytes()
    for broken in (b"garbage!" + raw[8:], raw[:16] + b"\x09" + raw[17:]):
        path.write_bytes(broken)
        assert not reader.is_there()
        with pytest.raises(ValueError, match="expected a step work page"):
            StepWorkReader(MEMORY, path)
    path.write_bytes(raw)
    assert reader.is_there()
    reader.close()


def test_what_is_no_such_page_is_refused(tmp_path: Path) -> None:
    (tmp_path / "work").write_bytes(b"KEEPBEAT" + bytes(4096))
    with pytest.raises(ValueError, match="expected a step work page of format 6"):
        StepWorkReader(MEMORY, tmp_path / "work")
    with pytest.raises(OSError):
        StepWorkReader(MEMORY, tmp_path / "nothing")


def test_a_block_is_the_difference() -> None:
    ones = (5,) * len(Section)
    assert block_between(work(5), work(10)) == WorkBlock(5, ones, ones, 5, ones, 10, 0)


def test_a_block_has_the_groups_in_which_something_was_entered_meanwhile() -> None:
    older = work(5)._replace(
        groups=(GroupEntries(7, 10, 1), GroupEntries(8, 2), GroupEntries(9, 4))
    )
    entered = GroupEntries(7, 15, 1), GroupEntries(8, 2), GroupEntries(9, 1), GroupEntries(6, 0, 3)
    found = block_between(older, work(10)._replace(groups=entered)).groups
    assert found == (GroupEntries(7, 5), GroupEntries(6, 0, 3)), "9 has begun to count anew"


@pytest.mark.parametrize(
    "odd",
    [
        {"own_ns": (-(1 << 62),) * len(Section)},
        {"own_ns": (1 << 62,) * len(Section)},
        {"device_ns": (1 << 62,) * len(Section)},
        {"wait_ns": -(1 << 62)},
        {"tokens": -1},
        {"micro_batches": -(1 << 63)},
        {"groups": (GroupEntries(7, -1),)},
    ],
    ids=str,
)
def test_what_no_rank_can_have_counted_reads_as_nothing(
    path: Path, writer: StepWorkWriter, odd: dict[str, Any]
) -> None:
    writer.write(work(5))
    reader = StepWorkReader(MEMORY, path)
    newest = reader.newest()
    assert newest == work(5)
    writer.write(work(6)._replace(**odd))
    assert reader.newest() is None and reader.at(5, newest) is None
    reader.close()
