"""Replicas of one node: what differs is found at the next boundary, named, never a horizon, and
given up; a claim that never was true alarms nobody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path, slot_paths
from keepstep.edge.shm.status_page import StatusPage
from keepstep.errors import CorruptionError, StoppedError
from keepstep.model.replicas import Replicas
from keepstep.model.snapshot import SlotState, Stamp
from keepstep.ports import Memory
from keepstep.runtime.rank import replica_watch
from keepstep.runtime.rank.capture import Capture
from keepstep.runtime.rank.commit_view import PagesOfOneNode
from keepstep.runtime.rank.holdings import Holdings
from tests.runtime.fakes import RankRoom

STATE_BYTES = 64
SHARED = (0, 32)  # of the state: the rest is each rank's own


class Replica:
    """One rank of several, which train in lockstep."""

    def __init__(self, home: Path, rank: int, ranks: int, claimed: bool, on: str) -> None:
        self.room = RankRoom(home, rank=rank, ranks=ranks)
        self.room.live.shared = Replicas(
            tuple(range(ranks)), 77, (0,), (SHARED,), claimed, "one tensor is the same"
        )
        options = replace(self.room.options, digest_every_steps=1, on_difference=on)
        page = StatusPage.own(MEMORY, options.job_dir, rank)
        assert page is not None
        self.page, self.rank = page, rank
        view = PagesOfOneNode(MEMORY, options.job_dir, ranks)
        self.capture = Capture(
            self.room.world, options, self.room.who, page, view, lambda *_: None, lambda: None
        )
        page.publish(rank=rank, world_size=ranks, epoch=1)
        run_acts(self.capture.prove())
        run_acts(self.capture.prepare())

    def step(self, step: int, shared: bytes) -> None:
        self.room.live.state = shared * SHARED[1] + bytes([self.rank]) * (STATE_BYTES - SHARED[1])
        self.capture.boundary(Stamp(step, 1), None)
        self.room.settle()

    @property
    def sealed(self) -> set[int]:
        status = self.page.read()
        assert status is not None
        return {v.stamp.step for v in status.slots if v.state is SlotState.SEALED}

    def holdings(self) -> Holdings:
        return run_acts(self.capture.prove())


class Job:
    def __init__(self, home: Path, ranks: int, claimed: bool = True, on: str = "rollback") -> None:
        self.ranks = [Replica(home, r, ranks, claimed, on) for r in range(ranks)]
        self.step_number = -1

    def step(self, wrong: int | None = None) -> dict[int, CorruptionError]:
        """All do one step; who ends, and with what."""
        self.step_number += 1
        ended = {}
        for one in self.ranks:
            value = self.step_number + (100 if one.rank == wrong else 0)
            try:
                one.step(self.step_number, bytes([value % 256]))
            except CorruptionError as error:
                ended[one.rank] = error
        return ended

    def close(self) -> None:
        for one in self.ranks:
            one.capture.close()
            one.page.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[list[Job]]:
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.close()


def test_of_three_the_wrong_one_ends_and_gives_up_what_went_wrong(
    tmp_path: Path, make: list[Job]
) -> None:
    job = Job(tmp_path, 3)
    make.append(job)
    for _ in range(3):
        assert job.step() == {}
    assert job.step(wrong=1) == {}, "nobody has sealed it yet"
    ended = job.step()
    assert set(ended) == {1} and "rank 1 differs from the 2 other replicas" in str(ended[1])
    wrong = job.ranks[1]
    [told] = wrong.room.journal.of("replicas-differ")
    assert "in state (1 of 1 tensor)" in told.why and told.data["step"] == 3
    assert max(wrong.sealed) == 2, "the snapshot from before is there"
    for other in (job.ranks[0], job.ranks[2]):
        assert 2 in other.sealed and not other.room.journal.of("replicas-differ")
    assert 4 not in job.ranks[0].sealed, "it has seen it, and captures nothing any more"
    found = [set(one.holdings().slot_of) for one in job.ranks]
    assert max(set.intersection(*found)) == Stamp(2, 1)


def test_of_two_whoever_sees_it_first_ends(tmp_path: Path, make: list[Job]) -> None:
    job = Job(tmp_path, 2)
    make.append(job)
    for _ in range(3):
        job.step()
    job.step(wrong=1)
    ended = job.step()
    assert set(ended) == {0} and "none of them has a majority" in str(ended[0])
    assert len(job.ranks[0].room.journal.of("replicas-differ")) == 1
    found = [set(one.holdings().slot_of) for one in job.ranks]
    assert max(set.intersection(*found)) == Stamp(2, 1), "whoever it was: both go back"


def test_once_it_differed_digests_that_agree_again_change_nothing(
    tmp_path: Path, make: list[Job]
) -> None:
    job = Job(tmp_path, 3)
    make.append(job)
    for _ in range(3):
        job.step()
    job.step(wrong=2)
    assert set(job.step()) == {2} and set(job.step()) == {2}
    found = [set(one.holdings().slot_of) for one in job.ranks]
    assert max(set.intersection(*found)) == Stamp(2, 1)


def test_a_claim_that_is_not_true_alarms_nobody(tmp_path: Path, make: list[Job]) -> None:
    job = Job(tmp_path, 3)
    make.append(job)
    for _ in range(12):
        assert job.step(wrong=1) == {}
    assert not any(one.room.journal.of("replicas-agree") for one in job.ranks)
    assert min(max(one.sealed) for one in job.ranks) >= 10, "and is captured as ever"


@pytest.mark.parametrize(("claimed", "steps", "alarms"), [(True, 2, True), (False, 2, False)])
def test_what_nobody_claims_has_to_show_more_often_that_it_is_the_same(
    tmp_path: Path, make: list[Job], claimed: bool, steps: int, alarms: bool
) -> None:
    job = Job(tmp_path, 3, claimed)
    make.append(job)
    for _ in range(steps + 1):
        job.step()
    job.step(wrong=1)
    assert bool(job.step()) is alarms


def test_candidates_that_are_equal_for_long_are_replicas(tmp_path: Path, make: list[Job]) -> None:
    job = Job(tmp_path, 3, claimed=False)
    make.append(job)
    for _ in range(8):
        job.step()
    [told] = job.ranks[0].room.journal.of("replicas-agree")
    assert "one tensor is the same" in told.why
    job.step(wrong=0)
    assert job.step() == {}, "nobody has said that they stay equal: they may be averaged by turns"
    assert "rank 0 differs" in job.ranks[0].room.journal.of("replicas-differ")[0].why
    assert max(job.ranks[0].sealed) == 9, "captured as ever"


def test_what_is_averaged_now_and_then_alarms_nobody(tmp_path: Path, make: list[Job]) -> None:
    """Local SGD: equal at every fifth step, and apart between them."""
    job = Job(tmp_path, 3, claimed=False)
    make.append(job)
    for step in range(40):
        assert job.step(wrong=None if step % 5 == 0 else 1) == {}
    assert not any(one.room.journal.of("replicas-differ") for one in job.ranks)


def test_what_is_only_told_is_told_once_and_captured(tmp_path: Path, make: list[Job]) -> None:
    job = Job(tmp_path, 3, on="tell")
    make.append(job)
    for _ in range(3):
        job.step()
    for _ in range(5):
        assert job.step(wrong=1) == {}
    assert len(job.ranks[1].room.journal.of("replicas-differ")) == 1
    assert all(7 in one.sealed for one in job.ranks)


def test_where_a_person_decides_the_error_says_so(tmp_path: Path, make: list[Job]) -> None:
    job = Job(tmp_path, 3, on="stop")
    make.append(job)
    for _ in range(3):
        job.step()
    job.step(wrong=1)
    ended = job.step()
    assert isinstance(ended[1], StoppedError) and "a person decides" in str(ended[1])


def test_a_slot_that_vanishes_meanwhile_costs_the_names_alone(
    tmp_path: Path, make: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank's may be removed after it was listed: who is wrong ends all the same."""
    job = Job(tmp_path, 3)
    make.append(job)
    for _ in range(3):
        job.step()
    job.step(wrong=1)

    def listed(memory: Memory, job_dir: Path, rank: int) -> list[Path]:
        return [*slot_paths(memory, job_dir, rank), slot_path(job_dir, rank, 9)]

    monkeypatch.setattr(replica_watch, "slot_paths", listed)
    ended = job.step()
    assert set(ended) == {1} and "rank 1 differs from the 2 other replicas" in str(ended[1])
    [told] = job.ranks[1].room.journal.of("replicas-differ")
    assert "rank 1 differs" in told.why and "in state" not in told.why


def test_the_digest_is_in_the_slots_header_and_in_the_question(
    tmp_path: Path, make: list[Job]
) -> None:
    job = Job(tmp_path, 2)
    make.append(job)
    for _ in range(4):
        job.step()
    asked = [one.holdings() for one in job.ranks]
    assert asked[0].group == asked[1].group == 77
    assert asked[0].digests == asked[1].digests and dict(asked[0].digests).keys() == set(
        asked[0].slot_of
    )
    for path in slot_paths(MEMORY, job.ranks[0].room.options.job_dir, 0):
        slot = Slot(MEMORY, path)
        header = slot.header()
        if header.state is SlotState.SEALED:
            assert dict(asked[0].digests)[header.stamp] == header.digest
        slot.close()
