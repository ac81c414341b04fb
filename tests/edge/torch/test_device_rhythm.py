"""The rhythm of a device's collectives, as its page tells it. The device is a fake: it takes any
stream next, and a collective whose peer is away hangs."""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d

from keepstep.edge.shm import collective_profile_page as page_module
from keepstep.edge.shm.collective_profile_page import (
    CollectiveProfileReader,
    QueuedProfileWriter,
    profile_path,
)
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.torch import device_rhythm as rhythm_module
from keepstep.edge.torch.device_rhythm import DeviceRhythm
from keepstep.edge.torch.groups import TorchGroup
from keepstep.edge.torch.membership import Membership
from keepstep.model.rhythm import NO_STEP, Pulse, StepSeen
from tests.edge.torch.fake_device import FakeDevice, FakeNccl, FakeStream

WITHIN = timedelta(seconds=9)


def one(life: FakeNccl, *_: Any) -> Any:
    return life


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(page_module, "STATES", 16)
    return 16


class Job:
    """One rank on a fake device, and whoever reads its page."""

    def __init__(self, home: Path, seed: int = 0, groups: int = 1) -> None:
        self.now_ns = 1000
        self.device = FakeDevice(random.Random(seed).randrange)
        self.path = profile_path(home, 0)
        self.page = QueuedProfileWriter(MEMORY, self.path, lambda: self.now_ns)
        self.reader = CollectiveProfileReader(MEMORY, self.path)
        self.let_go: list[bool] = []
        self.rhythm = DeviceRhythm(
            self.page,
            self.write,
            "device",
            self.device.new_stream("rhythm"),
            self.device,
            lambda: self.let_go.append(True),
        )
        members = Membership()
        members.device = torch.device("cpu")  # stands for the device
        members.watched = True
        members.on_order, members.on_queued = self.rhythm.begins, self.rhythm.queued
        self.nccl = [FakeNccl(self.device) for _ in range(groups)]
        self.groups = [
            TorchGroup(c10d.HashStore(), 0, 2, WITHIN, f"g{n}", members, build=partial(one, nccl))
            for n, nccl in enumerate(self.nccl)
        ]
        self.members = members

    def write(self, stream: FakeStream, number: int) -> bool:
        address = self.page.reached_address

        def arrive() -> None:
            ctypes.memmove(address, number.to_bytes(4, "little"), 4)

        stream.order(arrive)
        return True

    def sum(self, group: int = 0, at_once: bool = False) -> Any:
        options = c10d.AllreduceOptions()
        options.asyncOp = not at_once
        return self.groups[group].allreduce([torch.ones(3)], options)

    def pulse(self) -> Pulse:
        found = self.reader.pulse(self.now_ns)
        assert found is not None
        return found

    def says(self) -> tuple[int, int, int]:
        pulse = self.pulse()
        return pulse.step, pulse.entered, pulse.pending

    def run(self) -> None:
        while self.device.run_one():
            pass


@pytest.mark.parametrize("at_once", [False, True])
def test_a_collective_is_under_way_when_the_device_is_there_not_when_it_is_queued(
    tmp_path: Path, at_once: bool
) -> None:
    job = Job(tmp_path)
    job.rhythm.step(3)
    job.nccl[0].is_peer_lost = True  # it waits for its peer
    job.sum(at_once=at_once)
    assert job.says() == (NO_STEP, 0, 0), "the device has done nothing yet"
    job.run()
    assert job.says() == (3, 1, 1)
    job.nccl[0].is_peer_lost = False
    job.run()
    assert job.says() == (3, 1, 0)


def test_the_step_is_the_device_s_not_the_trainer_s(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for step in (3, 4):
        job.rhythm.step(step)
        for _ in range(2):
            job.device.current.order(lambda: None)  # the trainer computes
            job.sum().wait()
    seen = set()
    while job.device.run_one():
        seen.add(job.says())
    assert seen >= {(3, 2, 0), (4, 0, 0)} and job.says() == (4, 2, 0)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_order_each_step_shows_its_collectives_and_the_time_between_them(
    tmp_path: Path, seed: int
) -> None:
    """The device runs a drawn part of what is queued at any moment. All of a step's time is either
    idle or busy, and what is busy begins and ends with a collective."""
    draw, job = random.Random(seed), Job(tmp_path, seed, groups=2)
    seen: list[StepSeen] = []
    counts = [draw.randrange(5) for _ in range(12)]
    for step, count in enumerate(counts):
        job.rhythm.step(step)
        works = []
        for _ in range(count):
            job.device.current.order(lambda: None)
            works.append(job.sum(draw.randrange(2), at_once=draw.randrange(3) == 0))
            for _ in range(draw.randrange(8)):
                job.device.run_one()
                pulse = job.pulse()
                assert pulse.step <= step and 0 <= pulse.pending <= count
        for work in works:
            work.wait()
        if draw.randrange(2):
            job.device.synchronize()
            assert job.says() == (step, count, 0)
        seen += job.reader.steps()
    job.device.synchronize()
    job.rhythm.step(len(counts))
    job.device.synchronize()
    job.rhythm.step(NO_STEP)
    seen += job.reader.steps()
    assert [(s.step, s.collectives) for s in seen] == list(enumerate(counts))
    for before, after in itertools.pairwise(seen):
        assert before.ended_ns == after.began_ns
    for one in seen:
        assert all(0 <= gap.index <= one.collectives for gap in one.gaps)
        assert one.step_ns >= one.idle_ns
        if one.collectives == 0:
            assert one.idle_ns == one.step_ns
        else:
            assert one.idle_ns < one.step_ns


def test_while_nobody_trains_the_page_says_so_whatever_the_device_still_does(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path)
    job.rhythm.step(3)
    job.run()
    assert job.says() == (3, 0, 0)
    job.sum()
    job.rhythm.step(NO_STEP)
    assert job.says()[0] == NO_STEP
    job.run()
    assert job.says()[0] == NO_STEP
    job.sum()  # outside of any step
    job.rhythm.step(4)
    job.run()
    assert job.says() == (4, 0, 0)


def test_how_long_it_has_been_so_is_in_doubt_since_somebody_looked(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.rhythm.step(3)
    job.run()
    assert job.pulse() == Pulse(3, 0, 0, 1000, 1000), "nobody knows since when"
    job.now_ns = 5000
    assert job.pulse() == Pulse(3, 0, 0, 1000, 1000)
    job.now_ns = 7000
    job.sum()
    job.run()
    assert job.pulse() == Pulse(3, 1, 0, 7000, 2000), "it began since 5000"
    job.now_ns = 9000
    assert job.pulse() == Pulse(3, 1, 0, 7000, 2000)


@pytest.mark.parametrize("where", ["states", "marks"])
def test_a_step_that_is_not_wholly_known_is_not_told(
    tmp_path: Path, few_states: int, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The device is so far behind that the page cannot take what it will do, or we cannot."""
    if where == "marks":
        monkeypatch.setattr(rhythm_module, "MOST_MARKS", few_states // 2)
    job = Job(tmp_path)
    job.rhythm.step(0)
    for _ in range(few_states):  # two states each
        job.sum()
    job.rhythm.step(1)
    job.run()
    for step in (2, 3, 4, 5):
        job.rhythm.step(step)
        job.sum().wait()
        job.run()
    assert [(s.step, s.collectives) for s in job.reader.steps()] == [(2, 1), (3, 1)]
    assert job.says() == (5, 1, 0)


def test_numbers_begin_anew_behind_the_largest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_states: int
) -> None:
    monkeypatch.setattr(page_module, "_NUMBERS", 2 * few_states)
    job = Job(tmp_path)
    for step in range(2 * few_states):
        job.rhythm.step(step)
        job.sum().wait()
        job.run()
        assert job.says() == (step, 1, 0)


def test_a_device_that_cannot_write_costs_the_page_its_steps_and_nothing_else(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path)
    job.rhythm._write = lambda stream, number: False
    for step in range(3):
        job.rhythm.step(step)
        job.sum().wait()
        job.run()
    assert job.says() == (NO_STEP, 0, 0) and job.reader.steps() == []


def test_what_is_captured_into_a_graph_is_not_told(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.rhythm.step(3)
    job.device.is_capturing = True
    assert not job.rhythm.begins()
    job.rhythm.step(4)
    job.device.is_capturing = False
    job.run()
    assert job.says() == (3, 0, 0)


def test_an_error_of_the_device_is_the_program_s_to_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)
    job.rhythm.step(3)

    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(FakeStream, "wait_event", fails)
    assert job.rhythm.begins()
    job.rhythm.queued(job.device.Event())
    job.rhythm.step(4)
    assert not job.rhythm.begins()
    job.rhythm.close()


def test_one_that_cannot_be_queued_uses_no_network(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.rhythm.step(3)
    job.nccl[0].abort()
    job.sum()
    job.run()
    assert job.says() == (3, 1, 0)


def test_nor_does_one_that_torch_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error of its own, which is the program's."""

    def refuses(*_: Any) -> None:
        raise ValueError("Tensors must be CUDA and dense")

    job = Job(tmp_path)
    job.rhythm.step(3)
    monkeypatch.setattr(FakeNccl, "allreduce", refuses)
    with pytest.raises(ValueError, match="dense"):
        job.sum()
    job.run()
    assert job.says() == (3, 1, 0)


def test_the_page_is_let_go_of_when_the_device_has_written_all_of_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.rhythm.step(3)
    job.run()
    job.rhythm.close()
    assert job.let_go == [True] and job.says() == (NO_STEP, 0, 0)


def test_else_it_stays_mapped_for_the_life_of_the_process(tmp_path: Path) -> None:
    """A device that hangs, or has an hour to do: it will write there."""
    job = Job(tmp_path)
    job.rhythm.step(3)
    page = weakref.ref(job.page)
    job.rhythm.close()
    assert job.let_go == [] and job.says() == (NO_STEP, 0, 0)
    del job.rhythm, job.members, job.groups
    job.page = None  # type: ignore[assignment]
    gc.collect()
    assert page() is not None
