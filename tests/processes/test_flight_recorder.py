"""Torch's own flight recorder, of three real ranks of which one does not come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch._C._distributed_c10d as distributed

from keepstep.cli.log_reading import read_verdict

SCRIPT = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
pair = dist.new_group([0, 1])
for _ in range(5):
    dist.all_reduce(torch.ones(4))
if rank < 2:
    dist.broadcast(torch.ones(3), 0, group=pair)
try:
    if rank != 2:
        dist.all_gather([torch.empty(7) for _ in range(3)], torch.ones(7))
    else:
        time.sleep(6)  # longer than the others wait
except RuntimeError as error:
    print(error)
with open(f"{sys.argv[1]}/fr_trace_rank_{rank}", "wb") as file:
    file.write(_dump_fr_trace())
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(distributed, "_dump_fr_trace"), reason="torch records nothing")
def test_the_rank_that_did_not_come_is_named(tmp_path: Path) -> None:
    program, dumps = tmp_path / "train.py", tmp_path / "dumps"
    program.write_text(SCRIPT)
    dumps.mkdir()
    environment = os.environ | {
        "TORCH_FR_BUFFER_SIZE": "200",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
    ]
    done = subprocess.run(
        [*command, str(program), str(dumps)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert len(list(dumps.iterdir())) == 3, done.stdout + done.stderr
    verdict, _, unread, _ = read_verdict(dumps)
    assert verdict is not None and not unread
    assert (verdict.cause.name, verdict.rank) == ("hang", 2)
    assert "did not enter all_gather 6" in verdict.why
    assert "all_reduce 5 at train.py:11" in verdict.why
