"""Slow ranks on a device: timing events tell how long it computes for each rank, and the one that
multiplies more is named; the other one, which waits for it, is not. Skipped without CUDA.

Two ranks share one device here, which runs their kernels by turns: so each takes longer while the
other one computes, and the slow one's time is less than twice the other's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.step_work_page import StepWorkReader, work_path
from keepstep.edge.torch.device_marks import CudaMarks
from keepstep.model.events import Event
from keepstep.model.step_work import Section, StepWork, Timing
from keepstep.model.units import MS_NS
from keepstep.runtime.rank.device_clock import DeviceClock
from keepstep.runtime.rank.step_clock import StepClock
from tests.processes.test_run import until

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

ROOT = Path(__file__).parents[2]
SLOW_FROM, SLOW_RANK, STEPS, WITHIN_S = 400, 1, 20_000, 45.0


def test_sections_have_the_device_s_time_and_a_trainer_that_is_ahead_is_not_held() -> None:
    torch.cuda.init()
    written: list[StepWork] = []
    clock = DeviceClock(CudaMarks(), written.append)
    host = StepClock(lambda: 0, lambda: 0, lambda: 0, clock.step_ended, device=clock)
    torch.cuda.synchronize()
    began = time.monotonic()
    for step in range(3):
        host.step_begun()
        host.body_entered()
        torch.cuda._sleep(200_000_000)  # cycles: some 0.1 s
        host.enter(Section.UPDATE)
        torch.cuda._sleep(50_000_000)
        clock.waits(True)
        torch.cuda._sleep(100_000_000)
        clock.waits(False)
        host.step_ended(step, 1, 0)
    ahead_s = time.monotonic() - began
    torch.cuda.synchronize()
    all_s = time.monotonic() - began
    clock.close()
    assert ahead_s < all_s / 2, "the trainer has waited for the device"
    assert [work.step for work in written] == [0, 1, 2]
    took = written[-1].device_ns
    assert took[Section.COMPUTE] > 50 * MS_NS
    assert 2.5 < took[Section.COMPUTE] / took[Section.UPDATE] < 6, "4 times as many cycles"
    assert 1.2 < clock.wait_ns / took[Section.UPDATE] < 3, "twice as many"


class Training:
    def __init__(self, home: Path) -> None:
        self.home, self.stop = home, home / "stop"
        environ = {
            **os.environ,
            "KEEPSTEP_JOB": "slow",
            "KEEPSTEP_ARENA_DIR": str(home / "arena"),
            "KEEPSTEP_STATE_DIR": str(home / "state"),
            "KEEPSTEP_GRACE_S": "0",
            "STEPS": str(STEPS),
            "SLOW_FROM": str(SLOW_FROM),
            "SLOW_RANK": str(SLOW_RANK),
            "STOP": str(self.stop),
        }
        (home / "arena").mkdir()
        command = [sys.executable, "-m", "keepstep.cli.main", "run", "--nproc-per-node", "2"]
        with open(home / "output", "w") as output:
            self.process = subprocess.Popen(
                [*command, "-m", "tests.gpu.slow_rank"],
                cwd=ROOT,
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        return (self.home / "output").read_text()[-4000:]

    def events(self, kind: str) -> list[Event]:
        path = self.home / "state" / "slow" / "journal.jsonl"
        return [e for e in read_journal(path) if e.kind == kind] if path.exists() else []

    def named(self) -> list[Event]:
        return [e for e in self.events("slow-rank") if e.data["told_step"] > SLOW_FROM]

    def named_or_ended(self) -> list[Event]:
        """Who is named; for `until`."""
        found = self.named()
        assert found or self.process.poll() is None, f"it has ended: {self.output()}"
        return found

    def journal(self) -> list[str]:
        return [event.why for kind in ("slow-rank", "slow-unknown") for event in self.events(kind)]

    def pages(self) -> list[StepWorkReader]:
        job_dir = job_dir_of(self.home / "arena", "slow")
        return [StepWorkReader(MEMORY, work_path(job_dir, rank)) for rank in range(2)]

    def end(self) -> None:
        self.stop.touch()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(20)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    yield made
    made.end()


def test_the_rank_that_multiplies_twice_as_often_is_named(training: Training) -> None:
    until(training.named_or_ended, "word of a slow rank", WITHIN_S)
    took = []
    for page in training.pages():
        assert page.timing is Timing.DEVICE
        newest = page.newest()
        assert newest is not None and newest.step > SLOW_FROM
        older = page.at(newest.step - 5, newest)
        assert older is not None
        took.append(newest.device_ns[Section.COMPUTE] - older.device_ns[Section.COMPUTE])
        page.close()
    told = training.named()[0]
    assert told.data["rank"] == SLOW_RANK, (training.journal(), took)
    assert told.data["section"] == "compute", told.why
    assert {e.data["rank"] for e in training.named()} == {SLOW_RANK}, training.journal()
    assert took[SLOW_RANK] > took[1 - SLOW_RANK], took
    doubts = {event.data["doubt"] for event in training.events("slow-unknown")}
    assert "device" not in doubts, training.journal()
    training.end()
    assert training.process.returncode == 0, training.output()
