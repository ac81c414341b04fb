"""Soak: what counts as recovered, when the next fault comes, and what is said when one is not
recovered from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage
from keepstep.model.snapshot import Phase
from keepstep.testing import soak as soak_module
from keepstep.testing import witness as witness_module
from keepstep.testing.crew import CrewPlace
from keepstep.testing.faults import Fault
from keepstep.testing.injector import note
from keepstep.testing.lines import Lines
from keepstep.testing.soak import Passed, Soak
from keepstep.testing.tally import tally
from keepstep.testing.turns import DrillTurn, Shape
from keepstep.testing.witness import DrillFacts, Witness

ENDED = 2**22 + 1  # no process has such an id


class Job:
    """Two ranks that are pages, and a soak of them."""

    def __init__(self, room: Path, seconds: float, *turns: DrillTurn) -> None:
        place = CrewPlace(job_dir_of(room, "job"), room / "journal")
        place.job_dir.mkdir(parents=True)
        self.attempts, self.until, self.later, self.facts = (
            room / "attempts",
            room / "until.json",
            room / "later",
            DrillFacts("job"),
        )
        self.journal = FileJournal(place.journal, "keeper")
        self.pages = [
            page
            for rank in range(2)
            if (page := StatusPage.own(MEMORY, place.job_dir, rank)) is not None
        ]
        self.witness = Witness((), 2, self.facts, [place], self.attempts)
        self.soak = Soak(seconds, Shape(1, 2, 50.0, 3000.0), iter(turns), protects=False)
        self.soak.begin(self.witness, self.facts, self.later, self.until)

    def trains(
        self, step: int, epoch: int, *ranks: int, phase: Phase = Phase.FORWARD, pid: int = 0
    ) -> None:
        for rank in ranks or (0, 1):
            fields: dict[str, Any] = {
                "phase": phase,
                "epoch": epoch,
                "completed_step": step,
                "step": step + 1,
            }
            self.pages[rank].publish(rank=rank, world_size=2, pid=pid or os.getpid(), **fields)
        self.look()

    def look(self) -> None:
        for _ in range(3):
            self.witness.look()
            self.soak.look()

    @property
    def told(self) -> list[str]:
        return [
            f"{line['kind']} of {line['rank']} at {line['step']}"
            for line in Lines(self.later).new()
        ]

    @property
    def allowed(self) -> tuple[int, bool]:
        said = json.loads(self.until.read_text())
        return said["steps"], said["final"]

    def close(self) -> None:
        self.witness.close()
        self.journal.close()
        for page in self.pages:
            page.close()


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(witness_module, "SEARCH_S", 0.0)
    made: list[Job] = []

    def begin(seconds: float, *turns: DrillTurn) -> Job:
        made.append(Job(tmp_path, seconds, *turns))
        return made[0]

    yield begin
    made[0].close()


def kill(rank: int) -> DrillTurn:
    return DrillTurn(0.0, (Fault("kill", rank, 0),))


def test_the_next_fault_comes_when_all_ranks_have_done_a_new_step(jobs: Any) -> None:
    job: Job = jobs(1000.0, kill(1), kill(0), kill(0))
    job.trains(1, 1)
    assert job.told == [], "nothing new has been done yet"
    job.trains(2, 1)
    assert job.told == ["kill of 1 at 3"]
    note(job.attempts, 0, "about to", pid=ENDED, phase="forward", step=3)
    note(job.attempts, 0, "did")
    job.trains(9, 1, 0)  # whoever lives may go on for a moment
    job.trains(8, 1, 1, pid=ENDED)
    job.journal.record("resumed", "", step=8, epoch=2)
    job.trains(9, 2, 0)
    assert len(job.told) == 1, "one rank is gone"
    job.trains(8, 1, 1)
    assert len(job.told) == 1, "it is another process, in the old epoch"
    job.trains(8, 2, 1)
    assert len(job.told) == 1, "it has done no new step"
    job.trains(9, 2, 1, phase=Phase.RESTORE)
    assert len(job.told) == 1, "it restores once more"
    job.trains(9, 2, 1)
    assert job.told[1:] == ["kill of 0 at 10"] and [p.faults for p in job.soak.passed] == [(0,)]
    note(job.attempts, 1, "about to", pid=ENDED, phase="forward", step=10)
    note(job.attempts, 1, "did")
    job.trains(20, 2)
    assert len(job.told) == 2, "nobody has resumed since"


def test_two_at_once_are_one_turn(jobs: Any) -> None:
    job: Job = jobs(
        1000.0, DrillTurn(0.0, (Fault("kill", 0, 0), Fault("kill", 1, 0, "restore"))), kill(0)
    )
    job.trains(2, 1)
    assert job.told == ["kill of 0 at 3", "kill of 1 at 3"]
    for number in (0, 1):
        job.journal.record("resumed", "", step=2, epoch=2 + number)
        job.trains(5, 2 + number)
        assert len(job.told) == 2
        note(job.attempts, number, "about to", pid=ENDED, phase="forward", step=3)
        note(job.attempts, number, "did")
    job.journal.record("resumed", "", step=5, epoch=4)
    job.trains(6, 4)
    assert len(job.told) == 3 and [p.faults for p in job.soak.passed] == [(0, 1)]


def test_what_cannot_be_done_is_left_behind(jobs: Any) -> None:
    job: Job = jobs(1000.0, kill(0), kill(1))
    job.trains(2, 1)
    note(job.attempts, 0, "cannot", why="it is a test")
    job.look()
    assert len(job.told) == 2 and job.soak.passed == [] and job.facts.cannot == {0: "it is a test"}


def test_the_job_is_always_allowed_some_steps_and_never_fewer(jobs: Any) -> None:
    job: Job = jobs(1000.0, kill(0))
    first, final = job.allowed
    assert first >= 4 and not final
    job.trains(first - 1, 1)
    second, final = job.allowed
    assert second > first and not final
    job.trains(0, 1)
    assert job.allowed == (second, False)


def test_when_the_time_is_up_no_step_more_is_allowed(jobs: Any) -> None:
    job: Job = jobs(0.0, kill(0))
    job.trains(2, 1)
    steps, final = job.allowed
    assert (
        final
        and job.soak.stop_step == steps > 3
        and job.soak.is_over
        and not job.soak.failure
        and job.told == []
    )


def test_what_is_not_recovered_from_is_told_as_a_story(
    jobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: Job = jobs(1000.0, kill(1))
    job.trains(2, 1)
    note(job.attempts, 0, "about to", pid=ENDED, phase="forward", step=3)
    note(job.attempts, 0, "did")
    job.journal.record("rank-left", "rank 1 is gone without goodbye")
    monkeypatch.setattr(soak_module, "RECOVERED_WITHIN_S", -1.0)
    job.look()
    assert not job.soak.is_over, "a limit counts from where it began"
    job.soak.fail("expected the job to train on, found it ended with exit code 1")
    first, second, third = job.soak.failure.splitlines()
    assert first.endswith("exit code 1") and second.endswith(
        "before: keeper: rank-left: rank 1 is gone without goodbye"
    )
    assert third == "node 0: nothing is committed between nodes"
    assert job.soak.is_over and job.soak.stop_step is None


def test_a_job_that_does_not_begin_fails_the_soak(
    jobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_module, "RECOVERED_WITHIN_S", -1.0)
    job: Job = jobs(1000.0, kill(1))
    job.look()
    assert (
        "expected the job to begin within" in job.soak.failure
        and "0 of 2 ranks live" in job.soak.failure
    )


def test_a_tally() -> None:
    faults = [
        Fault("kill", 0, 1),
        Fault("stop", 0, 5),
        Fault("kill", 0, 5, "restore"),
        Fault("kill", 1, 9),
    ]
    s = 10**9
    passed = [
        Passed((0,), 0, 2 * s, 3 * s),
        Passed((1, 2), 10 * s, 15 * s, 15 * s),
        Passed((3,), 20 * s, 24 * s, 26 * s),
    ]
    report = {
        "faults": [{"kind": f.kind, "injected": True} for f in faults],
        "recoveries": [
            {"lost_steps": lost, "covered": covered}
            for lost, covered in ((0, True), (1, True), (0, True), (7, False))
        ],
        "sources": ["memory", "memory", "memory", "store"],
    }
    found = tally(faults, passed, 30 * s, report)
    assert (found["injected"], found["recovered"], found["faults_per_minute"]) == (4, 4, 8.0)
    assert found["injected_by_kind"] == {"kill": 3, "stop": 1}
    assert found["turns"]["kill"] == {
        "turns": 2,
        "trained_s": {"median": 3.0, "p99": 4.0},
        "protected_s": {"median": 4.5, "p99": 6.0},
    }
    assert found["turns"]["a second during recovery"]["trained_s"] == {"median": 5.0, "p99": 5.0}
    assert found["lost_steps"] == {"0": 2, "1": 1} and found["lost_steps_beyond_policy"] == {"7": 1}
    assert found["sources"] == {"memory": 3, "store": 1}
    assert (
        tally([], [], 0, {"faults": [], "recoveries": [], "sources": []})["faults_per_minute"]
        is None
    )
