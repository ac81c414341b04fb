"""Stacks of processes that do not answer: a stopped one shows its frames, and what cannot be had is
said and costs no time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from keepstep.edge.probes import stacks
from keepstep.edge.probes.process import read_process
from keepstep.model.diagnosis import Stack
from keepstep.testing.cluster import wait_for
from tests.edge.probes.test_process import SLEEP, child

STUCK = "def stuck_here():\n    while True: pass\nprint(flush=True)\nstuck_here()"

SAID = """Process 41: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 41 (idle): "MainThread"
    {innermost}
    train (train.py:12)
    <module> (train.py:30)
Thread 57 (active): "other"
    run (threading.py:982)
"""


@pytest.mark.parametrize(
    ("innermost", "waits"),
    [
        ("all_reduce (torch/distributed/distributed_c10d.py:2501)", True),
        ("wrapper (torch/distributed/c10d_logger.py:81)", True),
        ("_engine_run_backward (torch/autograd/graph.py:824)", None),
        ("load (train.py:7)", False),
    ],
)
def test_the_main_threads_frames_tell_whether_it_waits(innermost: str, waits: bool | None) -> None:
    frames = stacks.main_frames(SAID.format(innermost=innermost), 41)
    assert frames == [innermost, "train (train.py:12)", "<module> (train.py:30)"]
    assert stacks.waits(frames) is waits


def test_no_frames_tell_nothing() -> None:
    assert stacks.main_frames(SAID, 42) == [] and stacks.waits([]) is None


@pytest.mark.skipif(stacks.find_py_spy() is None, reason="py-spy is not installed")
@pytest.mark.parametrize("stopped", [False, True])
def test_the_frames_of_a_process_that_spins_or_is_stopped(stopped: bool) -> None:
    with child(STUCK) as pid:
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            wait_for(lambda: read_process(pid).state == "stopped", lambda: "not stopped")
        if "Permission" in stacks.take({0: pid}, 30)[0].text:
            pytest.skip("this kernel lets nobody look (ptrace_scope)")
        # A process that runs is read while it changes, so a look may fail.
        found = wait_for(
            lambda: look if (look := stacks.take({0: pid}, 30)[0]).digest else None,
            lambda: stacks.take({0: pid}, 30)[0].text,
        )
        assert "stuck_here" in found.text and "1 threads" in found.text
        assert found.digest and found.waits is False
        assert read_process(pid).state == ("stopped" if stopped else "running"), (
            "looking changes nothing"
        )


def test_without_py_spy_the_kernels_view_is_left_and_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    with child(SLEEP) as pid:
        found = stacks.take({0: pid}, 5)[0]
    assert f"process {pid}, 1 threads" in found.text and "py-spy is not installed" in found.text
    assert (found.digest, found.waits) == ("", None)


@pytest.mark.parametrize(
    ("script", "limit_s", "reason"),
    [
        ("exec sleep 600", 0.5, "did not answer within 0.5 s"),
        (
            "echo 'Error: Permission denied' >&2; exit 1",
            60,
            "no Python frames: Error: Permission denied",
        ),
        ("exit 0", 60, "py-spy found none"),
    ],
)
def test_a_tool_that_fails_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit_s: float, reason: str
) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(tool))
    began = time.monotonic()
    found = stacks.take({rank: os.getpid() for rank in range(4)}, limit_s)
    assert all(reason in stack.text for stack in found.values())
    assert time.monotonic() - began < 60, "four that hang for ten minutes each"


def test_they_are_saved_one_file_a_rank(tmp_path: Path) -> None:
    stacks.save(tmp_path / "deep" / "stacks-1", {0: Stack("a"), 3: Stack("b")})
    assert sorted(p.name for p in (tmp_path / "deep" / "stacks-1").iterdir()) == [
        "rank-0.txt",
        "rank-3.txt",
    ]
    assert (tmp_path / "deep" / "stacks-1" / "rank-3.txt").read_text() == "b"
