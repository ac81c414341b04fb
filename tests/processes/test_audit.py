"""`keepstep audit`: each thing that was forgotten is named, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "programs" / "omits.py"
PLANTED = {
    "ema": "train(): ema",
    "batches": "train(): batches",
    "torch_generator": "train(): torch_generator",
    "python_generator": "train(): python_generator",
    "numpy_generator": "train(): numpy_generator",
    "closure": "train(): closure",
    "scheduler": "train(): scheduler",
    "slotted": "train(): slotted",
    "running": "train(): running",
    "numbers": "train(): numbers",
    "recent": "train(): recent",
    "statistics": "train(): statistics",
    "module_global": "__main__: samples",
    "class_attribute": "__main__: Tally",
    "default": "__main__: remembers",
    "attribute": "train(): model",
}


def audited(tmp_path: Path, *words: str, code: int) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", "audit", "--json", *words],
        env={
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "KEEPSTEP_ARENA_DIR": str(tmp_path),
            "KEEPSTEP_STORE": str(tmp_path / "store"),
        },
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )
    assert run.returncode == code, run.stdout + run.stderr
    assert list(tmp_path.iterdir()) == [], "nothing of it stays, and no store was touched"
    found: dict[str, Any] = json.loads(run.stdout) if code < 2 else {"said": run.stderr}
    return found


@pytest.mark.everyday
def test_all_that_is_forgotten_is_named_and_nothing_else(tmp_path: Path) -> None:
    found = audited(tmp_path, str(PROGRAM), *PLANTED, code=1)
    assert {each["name"] for each in found["omissions"]} == set(PLANTED.values())
    assert found["records"] == ["train(): losses"]
    assert found["undetermined"] == []


@pytest.mark.everyday
def test_the_projects_own_example_forgets_nothing(tmp_path: Path) -> None:
    small = ("--width", "48", "--layers", "2", "--heads", "2", "--steps", "30")
    found = audited(tmp_path, str(ROOT / "examples" / "gpt.py"), *small, code=0)
    assert found["omissions"] == [] and found["undetermined"] == []
    assert found["compared"] > 100


def test_what_no_two_runs_have_in_common_is_not_called_forgotten(tmp_path: Path) -> None:
    found = audited(tmp_path, str(PROGRAM), "clock", code=0)
    assert [each["name"] for each in found["undetermined"]] == ["train(): stopwatch"]


def test_a_program_that_ends_before(tmp_path: Path) -> None:
    words = ("--kill-at", "29", "--steps", "4", str(PROGRAM))
    said = audited(tmp_path, *words, code=2)["said"].replace("\n", " ")
    assert "expected the program to begin step 33" in said
