"""What keeps processes from running: files of both kinds of cgroups, and of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from keepstep.edge.probes import cgroups, hindrance
from keepstep.model.step_work import Hindrance
from keepstep.testing.slowness import enter_quota


@pytest.mark.parametrize(
    ("text", "throttled_ns"),
    [
        ("usage_usec 9\nnr_throttled 3\nthrottled_usec 250\n", 250_000),
        ("nr_periods 7\nnr_throttled 3\nthrottled_time 250\n", 250),
        ("usage_usec 9\n", None),  # the root of v2 has no quota
        ("throttled_usec much\n", None),
    ],
)
def test_what_a_quota_has_cost(tmp_path: Path, text: str, throttled_ns: int | None) -> None:
    (tmp_path / "cpu.stat").write_text(text)
    assert hindrance.read_throttled_ns(tmp_path / "cpu.stat") == throttled_ns


@pytest.mark.parametrize(
    ("text", "stall_ns"),
    [
        (
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=17\nfull avg10=0.00 total=9\n",
            17_000,
        ),
        ("full avg10=0.00 total=9\n", None),
        ("some avg10=0.00\n", None),
        ("", None),
    ],
)
def test_what_a_want_of_memory_has_cost(tmp_path: Path, text: str, stall_ns: int | None) -> None:
    (tmp_path / "pressure").write_text(text)
    assert hindrance.read_stall_ns(tmp_path / "pressure") == stall_ns


def test_who_counts_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hindrance.read_throttled_ns(None) is None
    assert hindrance.read_stall_ns(tmp_path / "nothing") is None
    monkeypatch.setattr(hindrance, "MACHINE_PRESSURE", tmp_path / "nothing")
    assert hindrance.find_hindrance(2**22 + 1)() == Hindrance()


def test_the_cgroup_of_a_process_and_then_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, process = tmp_path / "cgroup", tmp_path / "proc" / "7"
    for directory in (root / "job", process):
        directory.mkdir(parents=True)
    (root / "job" / "cpu.stat").write_text("throttled_usec 5\n")
    (process / "cgroup").write_text("0::/job\n")
    (tmp_path / "mounts").write_text(f"cgroup2 {root} cgroup2 rw 0 0\n")
    (tmp_path / "machine").write_text("some avg10=0.00 total=3\n")
    monkeypatch.setattr(cgroups, "PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(hindrance, "MACHINE_PRESSURE", tmp_path / "machine")
    ask = hindrance.find_hindrance(7)
    assert ask() == Hindrance(5000, 3000)
    (root / "job" / "cpu.stat").write_text("throttled_usec 8\n")
    assert ask() == Hindrance(8000, 3000)
    (root / "job" / "memory.pressure").write_text("some avg10=0.00 total=1\n")
    assert hindrance.find_hindrance(7)() == Hindrance(8000, 1000)


def test_a_quota_above_counts_and_who_moves_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, process = tmp_path / "cgroup", tmp_path / "proc" / "7"
    for directory in (root / "pod" / "job", root / "other", process):
        directory.mkdir(parents=True)
    (root / "pod" / "cpu.stat").write_text("throttled_usec 5\n")
    (root / "pod" / "job" / "cpu.stat").write_text("throttled_usec 1\n")
    (root / "other" / "cpu.stat").write_text("throttled_usec 900\n")
    (process / "cgroup").write_text("0::/pod/job\n")
    (tmp_path / "mounts").write_text(f"cgroup2 {root} cgroup2 rw 0 0\n")
    monkeypatch.setattr(cgroups, "PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    ask = hindrance.find_hindrance(7)
    assert ask().throttled_ns == 6000
    (process / "cgroup").write_text("0::/other\n")
    assert ask().throttled_ns == 6000
    (root / "other" / "cpu.stat").write_text("throttled_usec 904\n")
    assert ask().throttled_ns == 10_000


@pytest.mark.parametrize("is_above", [False, True])
def test_a_real_quota_is_counted_wherever_it_is_set(is_above: bool) -> None:
    """Also for who is moved there while it runs."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    made: list[Path] = []
    try:
        ask = hindrance.find_hindrance(busy.pid)
        ask()
        try:
            made.append(enter_quota(busy.pid, 0.05))
        except (LookupError, OSError) as error:
            pytest.skip(f"no cgroup of processor time can be made here: {error}")
        if is_above:
            made.append(made[0] / "below")
            made[1].mkdir()
            (made[1] / "cgroup.procs").write_text(str(busy.pid))
        first = ask().throttled_ns
        assert first is not None
        until_s = time.monotonic() + 60
        while (ask().throttled_ns or 0) <= first and time.monotonic() < until_s:
            with suppress(subprocess.TimeoutExpired):
                busy.wait(0.05)
        assert (ask().throttled_ns or 0) > first
    finally:
        busy.kill()
        busy.wait()
        for cgroup in reversed(made):
            cgroup.rmdir()


def test_this_process() -> None:
    first = hindrance.find_hindrance(os.getpid())()
    assert all(value is None or value >= 0 for value in first)
