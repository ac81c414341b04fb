"""Ranks that share one snapshot of what is on a device, of which one is killed. The device is one
that does at once what is ordered; the processes, slots, votes and restores are real."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.share_runs import ended, figures, told
from keepstep.edge.shm.memory import MEMORY

PROGRAM = Path(__file__).parents[1] / "programs" / "shares_on_a_device.py"


@pytest.mark.soak
def test_two_ranks_share_one_snapshot_and_one_of_them_is_killed(tmp_path: Path) -> None:
    sizes = {"WIDTH": "1024", "STEPS": "20"}
    calm = ended(PROGRAM, tmp_path, "calm", KEEPSTEP_SHARE_REPLICAS="off", **sizes)
    assert calm.returncode == 0, calm.stderr[-4000:]
    killed = ended(PROGRAM, tmp_path, "k", KEEPSTEP_SHARE_REPLICAS="node", DIES_AT="12", **sizes)
    assert killed.returncode == 0, killed.stderr[-4000:]
    assert len(told(calm, "hash")) == 2 and told(killed, "hash") == told(calm, "hash")
    alone, shared = figures(calm), figures(killed)
    for rank in (0, 1):
        whole, part = alone[rank], shared[rank]
        for name in ("left", "kept"):
            assert part[name] <= whole[name] / 2 + MEMORY.block_bytes, (whole, part)
