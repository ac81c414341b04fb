"""Runs of `sharing.py` under `keepstep run`, and what their ranks have printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARING = ROOT / "benchmarks" / "gpu" / "sharing.py"


def ended(
    program: Path, home: Path, job: str, ranks: int = 2, timeout_s: float = 120, **settings: str
) -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ,
        "KEEPSTEP_JOB": job,
        "KEEPSTEP_ARENA_DIR": str(home),
        "KEEPSTEP_STATE_DIR": str(home / "state"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **settings,
    }
    command = [sys.executable, "-m", "keepstep.cli.main", "run", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, str(program)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def told(run: subprocess.CompletedProcess[str], word: str) -> dict[int, str]:
    """What each rank has printed behind that word."""
    found = {}
    for line in run.stdout.splitlines():
        first, _, rest = line.partition(" ")
        if first == word:
            rank, _, text = rest.partition(" ")
            found[int(rank)] = text
    return found


def figures(run: subprocess.CompletedProcess[str]) -> dict[int, dict[str, int]]:
    found = {}
    for rank, text in told(run, "figures").items():
        pairs = (word.split("=") for word in text.split())
        found[rank] = {name: int(value) for name, value in pairs}
    return found
