"""Real failures under torchrun, and what `keepstep diagnose` says of the logs they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.cli.log_reading import read_verdict

pytestmark = pytest.mark.timeout(300)

CULPRIT = 2
PROGRAM = f"""
import ctypes, datetime, os, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
for step in range(20):
    if step == 8 and dist.get_rank() == {CULPRIT}:
        FAULT
    gathered = torch.ones(8)
    dist.all_reduce(gathered)
    print(f"step {{step}} loss {{gathered[0]}}", flush=True)
"""
FAULTS = {
    "killed": "os.kill(os.getpid(), 9)",
    "crash": "ctypes.string_at(0)",
    "code": "raise KeyError('labels')",
    "host-allocation": "torch.empty(1 << 46)",
    "disk-full": "os.write(os.open('/dev/full', os.O_WRONLY), b'x')",
    "hang": "time.sleep(30)",
}


@pytest.mark.parametrize(
    ("kind", "is_redirected"),
    # In one file of all, a rank that is silent leaves no trace.
    [(kind, is_redirected) for kind in FAULTS for is_redirected in (True, False)][:-1],
)
def test_the_cause_and_the_culprit_are_named(
    kind: str, is_redirected: bool, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.replace("FAULT", FAULTS[kind]))
    logs = tmp_path / "logs"
    logs.mkdir()
    where = ["--log-dir", str(logs), "--redirects", "3"] if is_redirected else []
    with open(logs / "torchrun.log", "wb") as output:
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", "4", *where, str(program)),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=200,
            check=False,
        )
    assert ended.returncode != 0
    verdict, _, unread, _ = read_verdict(logs)
    assert verdict is not None and not unread
    assert (verdict.cause.name, verdict.rank) == (kind, CULPRIT), verdict.why
