"""Status pages: what is published is read as a whole or not at all, and whether its owner lives is
the kernel's word."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.edge.shm.double_buffered_page import DoubleBufferedPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import rank_dir
from keepstep.edge.shm.status_page import (
    BLANK,
    MAX_SLOTS,
    StatusPage,
    StatusPages,
    read_status,
    status_path,
)
from keepstep.model.shares import Share
from keepstep.model.snapshot import Phase, RankStatus, SlotState, SlotView, Stamp
from keepstep.model.units import PAGE_BYTES

i64 = st.integers(-(2**63), 2**63 - 1)
u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
shares = st.none() | st.builds(Share, u64, st.integers(0, 2**31 - 1))
states = st.sampled_from(SlotState)
views = st.builds(SlotView, states, st.builds(Stamp, i64, u64), st.just(False), shares, u64)
statuses = st.builds(
    RankStatus,
    *(
        u32,
        u32,
        u64,
        u64,
        u64,
        st.sampled_from(Phase),
        i64,
        i64,
        i64,
        u64,
        u64,
        u64,
        u64,
        u64,
        u64,
        u64,
        u64,
        u64,
        u64,
    ),
    loss=st.floats(allow_nan=False),
    slots=st.lists(views, max_size=MAX_SLOTS).map(tuple),
    collective=u64,
    span_steps=u32,
    share_plan=u64,
    kept_bytes=u64,
    replica_group=u64,
)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[StatusPage]:
    mine = StatusPage.own(MEMORY, tmp_path, 3)
    assert mine is not None
    yield mine
    mine.close()


def fields_of(status: RankStatus) -> dict[str, object]:
    return {k: v for k, v in status._asdict().items() if k != "updated_mono_ns"}


@given(status=statuses)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_field_reaches_a_stranger(
    page: StatusPage, tmp_path: Path, status: RankStatus
) -> None:
    page.publish(**fields_of(status))
    stranger = StatusPage(MEMORY, status_path(tmp_path, 3))
    read = stranger.read()
    stranger.close()
    assert read is not None and fields_of(read) == fields_of(status)


def test_changes_leave_the_other_fields(page: StatusPage) -> None:
    page.publish(loss=0.5, rank=3, completed_step=7)
    now = page.publish(phase=Phase.BACKWARD)
    assert (now.rank, now.completed_step, now.phase) == (3, 7, Phase.BACKWARD)
    assert page.read() == now and now.updated_mono_ns > 0


def test_a_page_never_written_reads_as_nothing(page: StatusPage) -> None:
    assert page.read() is None


def test_a_file_of_another_size_is_no_page(tmp_path: Path) -> None:
    path = tmp_path / "status"
    path.write_bytes(bytes(100))
    with pytest.raises(ValueError, match="expected a page of 4096 bytes, found 100"):
        StatusPage(MEMORY, path)


def test_one_owner_at_a_time(page: StatusPage, tmp_path: Path) -> None:
    onlooker = StatusPage(MEMORY, status_path(tmp_path, 3))
    assert onlooker.alive()
    assert StatusPage.own(MEMORY, tmp_path, 3) is None
    assert onlooker.alive(), "a refused second owner does not free the page"
    other = StatusPage.own(MEMORY, tmp_path, 4)
    assert other is not None
    other.close()
    onlooker.close()


def test_a_page_that_is_removed_in_that_moment_is_not_owned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = DoubleBufferedPage.lock

    def removed_first(page: DoubleBufferedPage, exclusive: bool) -> bool:
        MEMORY.remove(status_path(tmp_path, 3))
        return lock(page, exclusive)

    with monkeypatch.context() as while_removed:
        while_removed.setattr(DoubleBufferedPage, "lock", removed_first)
        assert StatusPage.own(MEMORY, tmp_path, 3) is None
    owned = StatusPage.own(MEMORY, tmp_path, 3)
    assert owned is not None and owned.is_there()
    owned.close()


def test_the_next_life_finds_what_the_last_one_said(tmp_path: Path) -> None:
    first = StatusPage.own(MEMORY, tmp_path, 0)
    assert first is not None
    said = first.publish(
        loss=0.5,
        incarnation=2,
        completed_step=41,
        slots=(SlotView(SlotState.SEALED, Stamp(41, 1)),),
    )
    onlooker = StatusPage(MEMORY, status_path(tmp_path, 0))
    first.close()  # as the kernel does for a killed process
    assert not onlooker.alive()
    second = StatusPage.own(MEMORY, tmp_path, 0)
    assert second is not None and second.read() == said
    second.publish(loss=0.5, incarnation=3)
    read = onlooker.read()
    assert read == BLANK._replace(
        loss=0.5, incarnation=3, updated_mono_ns=read.updated_mono_ns if read else 0
    ), "a new life says everything anew"
    assert onlooker.alive()
    second.close()
    onlooker.close()


def test_a_writer_killed_anywhere_leaves_the_old_page_or_the_new_one(
    page: StatusPage, tmp_path: Path
) -> None:
    path = status_path(tmp_path, 3)
    old = page.publish(
        loss=0.5, rank=3, completed_step=7, slots=(SlotView(SlotState.SEALED, Stamp(7, 1)),) * 3
    )
    before = path.read_bytes()
    new = page.publish(
        completed_step=8, decided_step=8, slots=(SlotView(SlotState.WRITING, Stamp(8, 1)),) * 4
    )
    after = path.read_bytes()
    words = [at for at in range(0, PAGE_BYTES, 8) if before[at : at + 8] != after[at : at + 8]]
    rng, outcomes = random.Random(1), []
    for _ in range(300):
        mixed = bytearray(before)
        for at in rng.sample(words, rng.randrange(len(words) + 1)):
            mixed[at : at + 8] = after[at : at + 8]
        path.write_bytes(mixed)
        outcomes.append(page.read())
    assert old in outcomes and all(o in (old, new) for o in outcomes)


def test_flipped_bits_are_never_read_as_facts(page: StatusPage, tmp_path: Path) -> None:
    path = status_path(tmp_path, 3)
    before = page.publish(loss=0.5, rank=3, completed_step=6)
    said = page.publish(
        completed_step=7, slots=(SlotView(SlotState.SEALED, Stamp(7, 1)),) * MAX_SLOTS
    )
    rng = random.Random(2)
    with open(path, "r+b") as file:
        for _ in range(1000):
            bit = rng.randrange(8 * 400) + 8 * (PAGE_BYTES // 2) * rng.randrange(2)
            for turn in range(2):  # flip, look, flip back
                byte = os.pread(file.fileno(), 1, bit // 8)[0]
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
                if turn == 0:
                    assert page.read() in (before, said)
    assert page.read() == said


def test_readers_beside_a_writer_see_whole_pages_only(page: StatusPage, tmp_path: Path) -> None:
    last, torn, seen = 3000, [], set()
    page.publish(completed_step=0, decided_step=0, slots=())

    def write() -> None:
        for step in range(1, last + 1):
            page.publish(
                completed_step=step,
                decided_step=step,
                slots=(SlotView(SlotState.SEALED, Stamp(step, 1)),) * (step % MAX_SLOTS),
            )

    writer = threading.Thread(target=write)
    onlooker = StatusPage(MEMORY, status_path(tmp_path, 3))
    writer.start()
    previous = 0
    while previous < last:
        status = onlooker.read()
        if status is None:
            continue
        seen.add(status.completed_step)
        whole = status.decided_step == status.completed_step and all(
            v.stamp.step == status.completed_step for v in status.slots
        )
        if not whole or status.completed_step < previous:
            torn.append(status)
        previous = max(previous, status.completed_step)
    writer.join()
    onlooker.close()
    assert torn == []
    assert len(seen) > 1, "the two never ran at the same time"


def test_a_page_that_says_nothing_new_is_the_same_object(page: StatusPage, tmp_path: Path) -> None:
    onlooker = StatusPage(MEMORY, status_path(tmp_path, 3))
    page.publish(loss=0.5, completed_step=7)
    first = onlooker.read()
    assert first is not None and onlooker.read() is first
    page.publish(completed_step=8)
    second = onlooker.read()
    assert (
        second is not None
        and (first.completed_step, second.completed_step) == (7, 8)
        and onlooker.read() is second
    )
    onlooker.close()


def test_marks_that_are_seen_before_their_body_hide_nothing(
    page: StatusPage, tmp_path: Path
) -> None:
    """On a machine that reorders writes a head may be visible before what it is the head of."""
    path = status_path(tmp_path, 3)
    page.publish(loss=0.5, completed_step=6)
    old = page.publish(completed_step=7)
    before = path.read_bytes()
    new = page.publish(completed_step=8)
    after = path.read_bytes()
    at = next(at for at in (0, PAGE_BYTES // 2) if before[at : at + 24] != after[at : at + 24])
    onlooker = StatusPage(MEMORY, path)
    path.write_bytes(before[:at] + after[at : at + 24] + before[at + 24 :])
    assert onlooker.read() == old
    path.write_bytes(after)
    assert onlooker.read() == new
    onlooker.close()


def test_a_page_that_is_removed_while_it_is_written_can_still_be_read(tmp_path: Path) -> None:
    owner, pages = StatusPage.own(MEMORY, tmp_path, 0), StatusPages(MEMORY, tmp_path)
    assert owner is not None and pages.read_mapped(1) == (None, False)
    owner.publish(loss=0.5, rank=0, step=4)
    status, is_removed = pages.read_mapped(0)
    assert status is not None and status.step == 4 and not is_removed
    MEMORY.remove(rank_dir(tmp_path, 0))
    owner.publish(loss=0.5, rank=0, step=5)
    status, is_removed = pages.read_mapped(0)
    assert status is not None and status.step == 5 and is_removed
    assert pages.read(0) is None
    again = StatusPage.own(MEMORY, tmp_path, 0)
    assert again is not None
    again.publish(loss=0.5, rank=0, step=0)
    status, is_removed = pages.read_mapped(0)
    assert status is not None and status.step == 0 and not is_removed
    for page in (owner, again, pages):
        page.close()


def test_kept_pages_tell_what_new_maps_would(tmp_path: Path) -> None:
    """Whatever becomes of the files: pages are published, owned by another life, removed with their
    directory, and made anew."""
    rng, pages, owners = random.Random(5), StatusPages(MEMORY, tmp_path), dict[int, StatusPage]()
    for number in range(400):
        rank, act = rng.randrange(4), rng.choice(("publish", "publish", "publish", "die", "remove"))
        if act == "publish":
            owner = owners.get(rank) or StatusPage.own(MEMORY, tmp_path, rank)
            assert owner is not None
            owners[rank] = owner
            owner.publish(loss=0.5, rank=rank, step=number)
        elif rank in owners:
            owners.pop(rank).close()
            if act == "remove":
                MEMORY.remove(rank_dir(tmp_path, rank))
        if rng.random() < 0.5:
            one = rng.randrange(4)
            assert pages.read(one) == read_status(MEMORY, tmp_path, one)
        if rng.random() < 0.5:
            assert pages.read_all() == {
                r: s for r in range(4) if (s := read_status(MEMORY, tmp_path, r)) is not None
            }
    pages.close()
    for owner in owners.values():
        owner.close()
