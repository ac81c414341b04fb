"""How far behind the training is the newest step that everybody can go back to?

Ranks under `keepstep run` on this machine, with a state of a chosen size that every step changes,
and steps of a chosen length. Meanwhile this process reads the ranks' status pages, as `keepstep
status` does, and notes how many completed steps a kill would cost at that moment.

    python benchmarks/recovery_point.py                         # 4 ranks of 512 MiB, steps of 0.1 s
    python benchmarks/recovery_point.py --ranks 8 --mib 128 --step-s 0.05
    python benchmarks/recovery_point.py --json

Reported: the period at which steps are captured, the bound that follows from it, and how many
steps a kill would have cost: the median, the 99th percentile and the most, after the first tenth
of the steps. The load average stands beside them: on a loaded machine captures take longer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from keepstep.core.resume.cadence import at_most_lost_steps
from keepstep.core.resume.cut import cut, holding_of
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPages
from keepstep.model.snapshot import RankStatus

SAMPLE_S = 0.005
WARM_UP = 0.1  # of the steps
PROGRAM = """
import sys, time
import torch, torch.distributed as dist
import keepstep
mib, steps, step_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)
keepstep.init_process_group()
weights = torch.zeros(mib << 18)
optimizer = torch.optim.SGD([torch.nn.Parameter(weights)], lr=1e-3)
weight = optimizer.param_groups[0]["params"][0]
weight.grad = torch.ones(weight.shape)
job = keepstep.protect(weight=weight, optimizer=optimizer)
for step in job.steps(steps):
    with step:
        began = time.perf_counter()
        time.sleep(max(0.0, 0.8 * step_s))
        dist.barrier()
        optimizer.step()
        time.sleep(max(0.0, step_s - (time.perf_counter() - began)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=512, help="state of a rank")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        behind, period = measure(args, Path(home))
    report = {
        "ranks": args.ranks,
        "mib": args.mib,
        "step_s": args.step_s,
        "period_steps": period,
        "bound_steps": at_most_lost_steps(period),
        "median_steps": statistics.median(behind),
        "p99_steps": statistics.quantiles(behind, n=100)[98],
        "most_steps": max(behind),
        "load": os.getloadavg()[0],
    }
    if args.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(f"{name:>14}  {value:.3g}")


def measure(args: argparse.Namespace, home: Path) -> tuple[list[int], int]:
    """Completed steps that a kill would have cost, moment by moment, and the longest period."""
    script = home / "train.py"
    script.write_text(PROGRAM)
    environment = os.environ | {
        "KEEPSTEP_ARENA_DIR": str(home),
        "KEEPSTEP_STATE_DIR": str(home / "state"),
        "KEEPSTEP_JOB": "point",
        "OMP_NUM_THREADS": "1",
    }
    numbers = map(str, (args.mib, args.steps, args.step_s))
    command = [
        sys.executable,
        "-m",
        "keepstep.cli.main",
        "run",
        "--standby",
        "0",
        "--nproc-per-node",
    ]
    command += [str(args.ranks), str(script), *numbers]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    behind: list[int] = []
    period = 1
    pages: StatusPages | None = None
    while process.poll() is None:
        time.sleep(SAMPLE_S)
        pages = pages or find_pages(home)
        if pages is None:
            continue
        found = list(pages.read_all().values())
        if len(found) < args.ranks or min(s.completed_step for s in found) < WARM_UP * args.steps:
            continue
        behind.append(lost_steps(found, args.ranks))
        period = max(period, *(s.span_steps for s in found))
    if process.returncode or not behind:
        raise SystemExit(f"the job ended with code {process.returncode}")
    return behind, period


def find_pages(home: Path) -> StatusPages | None:
    for found in home.rglob("status"):
        return StatusPages(MEMORY, found.parent.parent)
    return None


def lost_steps(found: list[RankStatus], ranks: int) -> int:
    """If a rank were killed now."""
    newest = cut([holding_of(status) for status in found], ranks)
    completed = min(status.completed_step for status in found)
    return max(0, completed - (-1 if newest is None else newest.step))


if __name__ == "__main__":
    main()
