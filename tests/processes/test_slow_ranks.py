"""A real rank that becomes slow is named by its agent, in its section; ranks that are not are not.

How soon depends on the machine, so no time is asserted here: `benchmarks/slow_ranks.py` measures
it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.step_work_page import StepWorkReader, work_path
from keepstep.model.events import Event
from keepstep.model.step_work import Section, StepWork
from tests.processes.test_run import until

pytestmark = pytest.mark.timeout(180)
KEEPSTEP = (sys.executable, "-m", "keepstep.cli.main")
SLOW_FROM = 180  # the step from which on a rank is slow, where one is


class Training:
    """An uneven job under `keepstep run`."""

    def __init__(self, home: Path, nproc: int, *given: str, **environ: str) -> None:
        self.home = home
        self.environ = {
            **os.environ,
            "KEEPSTEP_JOB": "uneven",
            "KEEPSTEP_ARENA_DIR": str(home / "arena"),
            "KEEPSTEP_STATE_DIR": str(home / "state"),
            "KEEPSTEP_GRACE_S": "0",
            **environ,
        }
        (home / "arena").mkdir()
        command = [
            *KEEPSTEP,
            "run",
            "--nproc-per-node",
            str(nproc),
            "-m",
            "keepstep.testing.uneven_job",
        ]
        self.process = subprocess.Popen([*command, "--pin", *given], env=self.environ)

    def told(self, kind: str) -> list[Event]:
        path = self.home / "state" / "uneven" / "journal.jsonl"
        return (
            [event for event in read_journal(path) if event.kind == kind] if path.exists() else []
        )

    def told_slow(self) -> list[Event]:
        """What is told of steps from the planted one on. On a busy machine a rank may be slow for
        what others do there: those words are left out."""
        hindered = {"neighbour", "quota", "memory"}
        return [
            event
            for event in self.told("slow-rank")
            if event.data["told_step"] > SLOW_FROM and event.data["cause"] not in hindered
        ]

    def page(self, rank: int) -> StepWorkReader:
        return StepWorkReader(MEMORY, work_path(job_dir_of(self.home / "arena", "uneven"), rank))

    def ends_well(self) -> None:
        assert self.process.wait(150) == 0

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Training]]:
    trainings: list[Training] = []
    yield trainings
    for training in trainings:
        training.end()


@pytest.mark.everyday
def test_the_slow_one_of_two_is_named_and_status_says_so(
    tmp_path: Path, started: list[Training]
) -> None:
    slow = ("--slow-rank", "1", "--slow-from", "180", "--factor", "2.5")
    training = Training(tmp_path, 2, "--steps", "900", "--compute-ms", "12", *slow)
    started.append(training)
    told = until(training.told_slow, "a word about the slow rank", 120)
    assert told[0].data["rank"] == 1 and told[0].data["section"] == "compute"
    answer = subprocess.run(
        [*KEEPSTEP, "status", "--json"],
        env=training.environ,
        capture_output=True,
        check=True,
        text=True,
    )
    [job] = json.loads(answer.stdout)["jobs"]
    assert [row["rank"] for row in job["slow"]] == [1] or job["state"] != "training"


@pytest.mark.parametrize("group", [(), ("--foreign-group",)])
def test_it_is_over_when_it_is_as_fast_as_before(
    tmp_path: Path, started: list[Training], group: tuple[str, ...]
) -> None:
    slow = ("--slow-rank", "0", "--slow-from", "180", "--slow-until", "600", "--factor", "2.5")
    training = Training(tmp_path, 2, "--steps", "900", "--compute-ms", "12", *slow, *group)
    started.append(training)
    training.ends_well()
    slow_one = training.told_slow()[0]
    assert (slow_one.data["rank"], slow_one.data["section"]) == (0, "compute")
    assert [event for event in training.told("slow-over") if event.data["rank"] == 0]


def test_a_rank_that_sleeps_in_its_steps_is_blocked(
    tmp_path: Path, started: list[Training]
) -> None:
    slow = ("--slow-rank", "1", "--slow-from", "180", "--factor", "1", "--sleep-ms", "25")
    training = Training(tmp_path, 2, "--steps", "1200", "--compute-ms", "12", *slow)
    started.append(training)
    slow_one = until(training.told_slow, "a word about the slow rank", 120)[0]
    assert (slow_one.data["rank"], slow_one.data["cause"]) == (1, "blocked")


def test_late_data_is_told_as_data(tmp_path: Path, started: list[Training]) -> None:
    slow = ("--slow-rank", "0", "--slow-from", "180", "--section", "data", "--factor", "9")
    training = Training(
        tmp_path, 2, "--steps", "1200", "--compute-ms", "12", "--data-ms", "3", *slow
    )
    started.append(training)
    slow_one = until(training.told_slow, "a word about the slow rank", 120)[0]
    assert (slow_one.data["rank"], slow_one.data["section"]) == (0, "data")


@pytest.mark.parametrize("section", ["forward", "backward", "update"])
@pytest.mark.parametrize("group", [(), ("--foreign-group",)])
def test_a_pass_and_an_update_are_sections_of_their_own(
    tmp_path: Path, started: list[Training], section: str, group: tuple[str, ...]
) -> None:
    """In a step of three equal parts one of them takes three times as long on one rank."""
    slow = ("--slow-rank", "1", "--slow-from", "180", "--section", section, "--factor", "3")
    parts = [f"--{part}-ms=5" for part in ("forward", "backward", "update")]
    given = ("--steps", "1200", "--compute-ms", "0", *parts, *slow, *group)
    training = Training(tmp_path, 2, *given)
    started.append(training)
    slow_one = until(training.told_slow, "a word about the slow rank", 120)[0]
    assert (slow_one.data["rank"], slow_one.data["section"]) == (1, section), slow_one.why
    words = section if section == "update" else f"{section} pass"
    assert f": {words} +" in slow_one.why and f"its {words} takes" in slow_one.data["detail"]


def test_what_a_rank_waits_is_seen_as_waiting(tmp_path: Path, started: list[Training]) -> None:
    slow = ("--slow-rank", "1", "--slow-from", "0", "--factor", "3")
    training = Training(tmp_path, 2, "--steps", "400", "--compute-ms", "10", *slow)
    started.append(training)

    def both() -> list[StepWork] | None:
        try:
            found = [training.page(rank).newest() for rank in range(2)]
        except (OSError, ValueError):
            return None
        works = [work for work in found if work is not None]
        return works if len(works) == 2 and works[0].step > 60 else None

    fast, late = until(both, "60 steps")
    assert fast.own_ns[Section.COMPUTE] < 0.9 * late.own_ns[Section.COMPUTE]
    assert fast.wait_ns > 1.2 * late.wait_ns
    assert fast.own_ns[Section.UPDATE] > 0 and fast.own_ns[Section.HOOK] > 0
    assert fast.collectives == late.collectives or abs(fast.step - late.step) > 0


def test_off_is_off(tmp_path: Path, started: list[Training]) -> None:
    slow = ("--slow-rank", "1", "--slow-from", "100", "--factor", "2")
    training = Training(
        tmp_path,
        2,
        *("--steps", "200", "--compute-ms", "5", *slow),
        KEEPSTEP_SLOW_RANKS="off",
    )
    started.append(training)
    until(lambda: (tmp_path / "arena").rglob("status"), "the ranks' pages")
    training.ends_well()
    assert training.told("slow-rank") == [] and not list((tmp_path / "arena").rglob("work"))
