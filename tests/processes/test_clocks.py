"""Clocks that jump: the wall clock is set back and forth by hours while a job trains and between
two lives, and the monotonic clock begins again as after a reboot. Nothing is lost by it, and the
account tells the time that passed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.economics.goodput import account
from keepstep.edge.os.journal import read_journal
from keepstep.model.events import Event
from keepstep.model.units import S_NS
from keepstep.testing.lab import Lab
from tests.processes.script_runs import ScriptRun
from tests.processes.test_torchrun_nodes import NODES, Training

pytestmark = pytest.mark.timeout(400)

HOUR_S = 3600
HELD_STEP = 6
ENDS_WITH = "model.state_dict(), optimizer.state_dict()"
PROGRAM = """
import torch
import keepstep
import os

torch.manual_seed(0)
if "RANK" in os.environ:
    keepstep.init_process_group()
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
if "RANK" in os.environ:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job = keepstep.protect(model=model, optimizer=optimizer)
for step in job.steps(14):
    with step:
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
"""
SHIFTED = """
import datetime, os, time

def _shift_s():
    with open(os.environ["CLOCK_SHIFT"]) as told:
        return float(told.read() or 0)

def _shifted(read, unit):
    return lambda: read() + type(read())(_shift_s() * unit)

time.time = _shifted(time.time, 1)
time.time_ns = _shifted(time.time_ns, 1_000_000_000)
"""


class Clock:
    """The wall clock of all processes of a run."""

    def __init__(self, room: Path) -> None:
        room.mkdir()
        (room / "sitecustomize.py").write_text(SHIFTED)
        self._shift = room / "shift"
        self._room = room
        self.set(0)

    def set(self, shift_s: int) -> None:
        told = self._shift.with_suffix(".new")
        told.write_text(str(shift_s))
        told.rename(self._shift)

    def environ(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(self._room), os.environ.get("PYTHONPATH")]))
        return {"PYTHONPATH": path, "CLOCK_SHIFT": str(self._shift)}


@contextlib.contextmanager
def run(room: Path, ranks: int, held_step: int, clock: Clock) -> Iterator[ScriptRun]:
    made = ScriptRun(room, PROGRAM, ENDS_WITH, ranks, held_step, environ=clock.environ())
    try:
        yield made
    finally:
        made.stop()
        _end_keepers(made)


def _end_keepers(of: ScriptRun) -> None:
    for event in of.events("keeper-started"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(event.data["pid"], signal.SIGKILL)


def _journal(of: ScriptRun) -> list[Event]:
    return list(read_journal(of.state / "j" / "journal.jsonl"))


def _undisturbed(room: Path, ranks: int) -> list[str]:
    with run(room / "undisturbed", ranks, -1, Clock(room / "true")) as alone:
        return alone.end()


def _assert_resumed(of: ScriptRun) -> None:
    resumed = of.events("resumed")[-1]
    assert (resumed.data["source"], resumed.data["lost_steps"]) == ("memory", 0), resumed.why


def _assert_account_is_of(events: list[Event], lasted_s: float) -> None:
    """Whatever the wall clock said."""
    told_s = account(events).wall_ns / S_NS
    assert told_s <= lasted_s, f"{told_s} s are told of a run that took {lasted_s} s"


@pytest.mark.parametrize("hours", [-5, 5])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_wall_clock_jumps_in_a_job_and_between_two_lives(
    tmp_path: Path, ranks: int, hours: int
) -> None:
    clock = Clock(tmp_path / "clock")
    began_s = time.monotonic()
    with run(tmp_path / "killed", ranks, HELD_STEP, clock) as job:
        job.hold()
        clock.set(hours * HOUR_S)
        job.kill(ranks - 1)
        job.wait_for("resumed", 2)
        clock.set(-hours * HOUR_S)
        killed = job.end()
        events = _journal(job)
    lasted_s = time.monotonic() - began_s
    shifts = {round((e.wall_ns - e.mono_ns) / S_NS / HOUR_S) for e in events}
    assert max(shifts) - min(shifts) >= 5, "the clock of the processes was not shifted"
    _assert_resumed(job)
    assert killed == _undisturbed(tmp_path, ranks)
    _assert_account_is_of(events, lasted_s)


def test_after_a_reboot_the_monotonic_clock_begins_again(tmp_path: Path) -> None:
    """The arena is a directory that outlives the machine's boot; so are store and journal."""
    clock = Clock(tmp_path / "clock")
    uptime_s = int(float(Path("/proc/uptime").read_text().split()[0]))
    reboot = ["unshare", "-T", f"--monotonic={30 - uptime_s}", f"--boottime={30 - uptime_s}"]
    if subprocess.run([*reboot, "true"], capture_output=True).returncode:
        pytest.skip("expected the right to make a time namespace")
    with run(tmp_path / "killed", 1, HELD_STEP, clock) as job:
        job.hold()
        _end_keepers(job)
        job.within = reboot
        job.kill(0)
        killed = job.end()
        events = _journal(job)
    lives = [e.mono_ns for e in events if e.kind == "resumed"]
    assert lives[-1] < lives[0], "the monotonic clock has not begun again"
    _assert_resumed(job)
    assert killed == _undisturbed(tmp_path, 1)


def test_the_clocks_of_several_nodes_are_set_back_and_a_keeper_and_a_rank_are_killed(
    tmp_path: Path,
) -> None:
    """The keeper that follows says that it began before the one that it follows."""
    with _nodes(tmp_path / "true") as alone:
        undisturbed = alone.digests()
    with _nodes(tmp_path / "set back") as job:
        job.train_until(8)
        job.clock.set(-5 * HOUR_S)
        before = [event.data["pid"] for event in job.events("keeper-started")]
        os.kill(before[-1], signal.SIGKILL)
        job.wait(lambda: len(job.events("keeper-started")) > len(before), "the next keeper")
        status = job.status(1)
        assert status is not None
        os.kill(status.pid, signal.SIGKILL)
        assert job.digests() == undisturbed
        last = job.events("resumed")[-1]
        assert last.data["source"] == "memory", last.why
        assert job.events("node-lost") == [], "a keeper was refused"


class Nodes(Training):
    """Two nodes under `keepstep run`, whose processes have one wall clock."""

    def __init__(self, lab: Lab, room: Path, log: Any) -> None:
        self.clock = Clock(room / "clock")
        super().__init__(lab, room, log, "run", self.clock.environ())


@contextlib.contextmanager
def _nodes(room: Path) -> Iterator[Nodes]:
    room.mkdir()
    with Lab(NODES, room) as lab, open(room / "log", "wb") as log:
        job = Nodes(lab, room, log)
        try:
            yield job
        finally:
            job.crew.end()
