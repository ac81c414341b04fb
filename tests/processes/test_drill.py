"""Drills: every kind of fault in real processes, and the same final state as without it. And drills
that must not succeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)

STEPS = 45


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the undisturbed runs are paid for once."""
    return tmp_path_factory.mktemp("drills")


def drill(
    work: Path,
    *faults: str,
    nproc: int = 1,
    launcher: str = "plain",
    steps: int = STEPS,
    more: tuple[str, ...] = (),
) -> tuple[int, dict[str, Any]]:
    """(exit code, report)."""
    command = [sys.executable, "-m", "keepstep.cli.main", "drill", "--json", "--work", work]
    command += ["--nproc", nproc, "--steps", steps, "--launcher", launcher, *more]
    for fault in faults:
        command += ["--fault", fault]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=170)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report


def prove(work: Path, *faults: str, **how: Any) -> dict[str, Any]:
    code, report = drill(work, *faults, **how)
    assert code == 0 and report["proved"], json.dumps(report, indent=1)
    assert report["recovered"] and report["bit_equal"] and report["within_one_step"]
    assert all(f["injected"] and f["seen"] for f in report["faults"])
    assert not [name for name in os.listdir("/dev/shm") if report["job"] in name]
    return report


def test_a_rank_killed_at_every_phase(work: Path) -> None:
    """The one of two ranks dies seven times under `keepstep run`; each time the job goes on, at
    most one step behind."""
    phases = ["forward", "backward", "update", "capture", "seal", "persist"]
    faults = [f"kill:rank={n % 2},step={5 * n + 4},phase={phase}" for n, phase in enumerate(phases)]
    report = prove(work, *faults, "kill:rank=1,step=38,phase=restore", nproc=2, launcher="run")
    met = [f["phase"] for f in report["faults"]]
    assert met == [*phases, "forward", "restore"]  # a restore needs a cause: one kill more
    assert report["restarts"] == len(met) and len(report["lost_steps"]) == len(met) - 1


def test_torchrun_unchanged(work: Path) -> None:
    report = prove(
        work,
        "kill:rank=0,step=12,phase=update",
        "torn:rank=1,step=25",
        nproc=2,
        launcher="torchrun",
    )
    assert report["sources"] == ["memory", "memory"]


def test_stopped_torn_and_killed_from_outside(work: Path) -> None:
    report = prove(
        work,
        "stop:step=8,phase=backward",
        "torn:step=16,phase=update",
        "kill:step=24,after=7",
        "stop:step=24,phase=restore",
    )
    assert [f["phase"] for f in report["faults"]][
        1
    ] == "seal"  # armed in the update, done at the next seal


def test_without_a_keeper(work: Path) -> None:
    """Alone its death costs nothing; with a rank's, the next keeper finds what the rank left; and
    while it writes a checkpoint."""
    report = prove(
        work,
        "keeper-kill:step=6",
        "keeper-kill:step=14,phase=persist",
        "keeper-kill:step=30",
        "kill:step=30,after=5",
    )
    assert report["restarts"] == 1


@pytest.mark.everyday
def test_damaged_memory_and_damaged_checkpoint(work: Path) -> None:
    """The next source is used, and what was damaged is named (that is the evidence)."""
    report = prove(work, "flip:step=12,phase=update", "flip:step=32,where=store,phase=update")
    assert report["sources"] == ["memory", "store"]
    assert (
        "/slot-" in report["faults"][0]["evidence"]
        and "/step-0000" in report["faults"][1]["evidence"]
    )


@pytest.mark.parametrize("place", ["store", "arena"])
def test_no_space_left(work: Path, place: str) -> None:
    code, report = drill(work, f"full:step=15,where={place},phase=update")
    if code == 3:  # what a user without the right to mount is told
        (fault,) = report["faults"]
        assert (
            not fault["injected"]
            and "cannot be mounted" in fault["evidence"]
            and not report["proved"]
        )
        pytest.skip(fault["evidence"])
    assert code == 0, json.dumps(report, indent=1)
    assert report["restarts"] == (1 if place == "arena" else 0)
    assert not os.path.ismount(work / place)


def test_what_is_not_the_same_is_not_proved(work: Path) -> None:
    code, report = drill(work, "kill:step=5", steps=10, more=("--reference-hash", "0" * 64))
    assert (code, report["recovered"], report["bit_equal"], report["faults"][0]["seen"]) == (
        1,
        True,
        False,
        True,
    )


def test_what_did_not_happen_is_not_proved(work: Path) -> None:
    code, report = drill(
        work, "kill:step=5,phase=persist", steps=10, more=("--persist-every", "100")
    )
    assert (code, report["bit_equal"], report["faults"][0]["injected"]) == (3, True, False)


@pytest.mark.everyday
def test_a_wrong_command_line_says_so() -> None:
    command = [sys.executable, "-m", "keepstep.cli.main", "drill", "--fault", "kill:step=70"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "expected step= below 60 (--steps), found 70" in done.stderr.replace("\n", " ")
