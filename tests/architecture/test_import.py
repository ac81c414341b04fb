"""What importing costs and brings along, measured in fresh interpreters, and the names the package
exports."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import keepstep

IMPORT_S = 0.1
TRIES = 10  # the best of them counts: another process on the machine can only make an import slower
EXPORTED = {
    *("__version__", "Config", "Job", "init_process_group", "prebuilt", "protect"),
    *(
        "KeepstepError",
        "ConfigError",
        "MemoryBudgetError",
        "PeerLost",
        "IdentityError",
        "LayoutError",
        "DamageError",
        "DeviceError",
        "KeeperError",
        "StoreError",
        "UnsavedError",
        "UntrustedError",
        "WrongNumbersError",
    ),
}


def fresh_import(module: str) -> dict[str, Any]:
    """How much processor time a new interpreter needs for `module` (others use the machine too),
    and every module it has afterwards."""
    code = (
        "import json, sys, time\n"
        "begin = time.process_time()\n"
        f"import {module}\n"
        "took_s = time.process_time() - begin\n"
        "print(json.dumps({'took_s': took_s, 'modules': list(sys.modules)}))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def test_importing_keepstep_is_light() -> None:
    modules = set(fresh_import("keepstep")["modules"])
    assert "keepstep" in modules
    assert modules & {"torch", "numpy", "rich", "typer", "fsspec"} == set()


def test_importing_keepstep_is_quick() -> None:
    took_s: list[float] = []
    while len(took_s) < TRIES and min(took_s, default=IMPORT_S) >= IMPORT_S:
        took_s.append(fresh_import("keepstep")["took_s"])
    assert min(took_s) < IMPORT_S, took_s


def test_the_keeper_never_reaches_torch() -> None:
    if importlib.util.find_spec("keepstep.runtime.keeper.process") is None:
        pytest.skip("there is no keeper yet")
    modules = set(fresh_import("keepstep.runtime.keeper.process")["modules"])
    assert modules & {"torch", "numpy"} == set()


def test_a_trainer_imports_neither_the_simulation_nor_the_harness_of_tests() -> None:
    modules = fresh_import("keepstep.runtime.rank.session")["modules"]
    found = {".".join(name.split(".")[:2]) for name in modules if name.startswith("keepstep.")}
    away = {"testing", "sim", "dashboard", "cli", "ray", "integrations"}
    assert found and found & {f"keepstep.{room}" for room in away} == set()


def test_exported_names() -> None:
    if not hasattr(keepstep, "__all__"):
        pytest.skip("nothing is exported yet")
    assert set(keepstep.__all__) == EXPORTED
    assert len(keepstep.__all__) == len(EXPORTED)
    for name in keepstep.__all__:
        assert getattr(keepstep, name) is not None


RANK = """
import json, sys
import torch, keepstep
model = torch.nn.Linear(3, 3)
job = keepstep.protect(model=model)
slow = [n for n in ("torch.distributed.tensor", "torch.distributed.checkpoint") if n in sys.modules]
print(json.dumps({"step": job.step, "slow": slow}), flush=True)
if sys.argv[1] == "die":
    for step in job.steps(3):
        pass
    job.close(ok=False)
    sys.exit(1)
job.close(ok=True)
"""


def test_a_restart_imports_neither_dtensors_nor_dcp(tmp_path: Path) -> None:
    """Over a second, which only a program that has them, or one that reads a store, is to wait
    for. (torch's optimizers import the former by themselves.)"""
    places = {
        "KEEPSTEP_ARENA_DIR": str(tmp_path / "arena"),
        "KEEPSTEP_STATE_DIR": str(tmp_path / "state"),
        "KEEPSTEP_JOB": "imports",
        "KEEPSTEP_GRACE_S": "120",
    }
    (tmp_path / "arena").mkdir()
    told = []
    for mode in ("die", "end"):
        run = subprocess.run(
            [sys.executable, "-c", RANK, mode],
            env={**os.environ, **places},
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        told.append(json.loads(run.stdout.splitlines()[0]))
    assert told[0]["step"] < 0 < told[1]["step"], "the second one restores"
    assert [found["slow"] for found in told] == [[], []]
