"""What importing costs and brings along, measured in fresh interpreters, and the names the package
exports."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

import keepstep

IMPORT_S = 0.1
TRIES = 10  # the best of them counts: another process on the machine can only make an import slower
EXPORTED = {
    *("__version__", "Config", "Job", "init_process_group", "protect"),
    *(
        "KeepstepError",
        "ConfigError",
        "MemoryBudgetError",
        "PeerLost",
        "IdentityError",
        "LayoutError",
        "DamageError",
        "KeeperError",
        "StoreError",
        "UnsavedError",
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


def test_exported_names() -> None:
    if not hasattr(keepstep, "__all__"):
        pytest.skip("nothing is exported yet")
    assert set(keepstep.__all__) == EXPORTED
    assert len(keepstep.__all__) == len(EXPORTED)
    for name in keepstep.__all__:
        assert getattr(keepstep, name) is not None
