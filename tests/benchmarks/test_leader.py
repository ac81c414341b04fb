"""The leader's benchmark measures what commits a step."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # as when it is started

from benchmarks.leader import measure


def test_a_small_job_is_measured() -> None:
    told = measure(nodes=4, steps=2)
    assert "4 nodes" in told and "32 ranks" in told and "safety" in told
