"""A training on a device in a process of its own, as tests of a whole job start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def ended(module: str, arena: Path, job: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """`module`: of `tests.gpu`. `settings`: of its environment, besides."""
    environ = {
        **os.environ,
        "KEEPSTEP_JOB": job,
        "KEEPSTEP_ARENA_DIR": str(arena),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **settings,
    }
    return subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{module}"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
