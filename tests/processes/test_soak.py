"""A soak: random faults for half a minute on one node and on two, and the same final state as a
training in which nothing happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)

SECONDS = 30


def soak(work: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """(exit code, report)."""
    command = [
        sys.executable,
        "-m",
        "keepstep.cli.main",
        "drill",
        "--json",
        "--work",
        str(work),
        "--soak",
        str(SECONDS),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report


@pytest.mark.parametrize(
    "options",
    [
        ("--seed", "1", "--nproc", "2"),
        ("--seed", "2", "--nproc", "1", "--nodes", "2", "--policy", "copies:2"),
    ],
    ids=["one", "two"],
)
def test_every_fault_is_recovered_from_and_the_end_is_bit_equal(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    code, report = soak(tmp_path, *options)
    story = json.dumps({**report, "recoveries": []}, indent=1)
    assert code == 0 and report["proved"] and report["bit_equal"] and report["failure"] == "", story
    found = report["soak"]
    assert found["injected"] == found["recovered"] == len(report["faults"]) >= 1, story
    assert found["lasted_s"] >= SECONDS and report["steps"] > 1
    assert all(fault["seen"] for fault in report["faults"]), story
    assert not report["left_over"] and not [
        name for name in os.listdir("/dev/shm") if report["job"] in name
    ]


@pytest.mark.parametrize(
    "options",
    [
        ("--soak", "5", "--random", "3"),
        ("--soak", "5", "--kinds", "kill-node"),
        ("--soak", "5", "--launcher", "torchrun"),
        ("--soak", "5", "--rdzv-backend", "etcd"),
    ],
)
def test_what_cannot_be_is_refused(options: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", "drill", *options],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "expected" in done.stderr and "found" in done.stderr
