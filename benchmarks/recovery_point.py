"""How far behind the training is the newest step that everybody can go back to?

Ranks under `keepstep run` on this machine, with a state of a chosen size that every step changes,
and steps of a chosen length. Meanwhile this process reads the ranks' status pages, as `keepstep
status` does, and notes how many completed steps a kill would cost at that moment.

    python benchmarks/recovery_point.py                         # 4 ranks of 512 MiB, steps of 0.1 s
    python benchmarks/recovery_point.py --ranks 8 --mib 128 --step-s 0.05
    python benchmarks/recovery_point.py --kills 20              # and what kills cost indeed
    python benchmarks/recovery_point.py --json

With `--kills` ranks get SIGKILL in turn, at random moments that are spread over the steps; the next
one comes when all have done some steps after the one before. Whoever resumes looks at each number
of its state: a step that is not whole ends the benchmark with an error.

Reported: the period at which steps are captured, the bound that follows from it, and how many steps
a kill would have cost: the median, the 99th percentile and the most, after the first tenth of the
steps; and what each kill has cost, as the vote told it. The load average stands beside them: on a
loaded machine captures take longer.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script

from keepstep.core.resume.cadence import at_most_lost_steps
from keepstep.core.resume.cut import cut, holding_of
from keepstep.edge.os.journal import JournalTail
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPages
from keepstep.model.snapshot import Phase, RankStatus

SAMPLE_S = 0.005
WARM_UP = 0.1  # of the steps
CALM_STEPS = 5  # done by all after a recovery, before the next kill
PROGRAM = """
import sys, time
import torch, torch.distributed as dist
import keepstep
mib, steps, step_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)
keepstep.init_process_group()
weights = torch.zeros(mib << 18)
optimizer = torch.optim.SGD([torch.nn.Parameter(weights)], lr=1.0)  # whole numbers: exact
weight = optimizer.param_groups[0]["params"][0]
ones = torch.ones(weight.shape)
job = keepstep.protect(weight=weight, optimizer=optimizer)
last = -1
for step in job.steps(steps):
    if step != last + 1 or last == -1:  # restored, in a new process or in this one
        assert bool((weight == -float(step)).all()), f"what was restored is not step {step - 1}"
    last = int(step)
    with step:
        began = time.perf_counter()
        time.sleep(max(0.0, 0.8 * step_s))
        dist.barrier()
        weight.grad = ones
        optimizer.step()
        weight.grad = None  # else it were part of the state
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
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    watch = harness.watch()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        behind, period, cost = measure(args, Path(home))
    report = {
        "ranks": args.ranks,
        "mib": args.mib,
        "step_s": args.step_s,
        "period_steps": period,
        "bound_steps": at_most_lost_steps(period),
        "median_steps": statistics.median(behind),
        "p99_steps": statistics.quantiles(behind, n=100)[98],
        "most_steps": max(behind),
        "kills": len(cost),
        "most_lost_steps": max(cost, default=0),
        "load": os.getloadavg()[0],
    }

    def show(_: dict[str, Any]) -> None:
        for name, value in report.items():
            print(f"{name:>14}  {value:.3g}")

    harness.tell(watch.end(), report, args.json, show)


def measure(args: argparse.Namespace, home: Path) -> tuple[list[int], int, list[int]]:
    """Completed steps that a kill would have cost, moment by moment; the longest period; and what
    each kill has cost."""
    process = start(args, home)
    killer = Killer(args, JournalTail(home / "state" / "point" / "journal.jsonl"))
    try:
        behind, period = watch(args, home, process, killer)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    killer.read()
    if process.returncode or not behind:
        raise SystemExit(f"the job ended with code {process.returncode}")
    if len(killer.cost) != args.kills:
        raise SystemExit(f"expected {args.kills} kills and as many votes, found {killer.cost}")
    return behind, period, killer.cost


def watch(
    args: argparse.Namespace, home: Path, process: subprocess.Popen[bytes], killer: Killer
) -> tuple[list[int], int]:
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
        if all(status.phase not in (Phase.RESTORE, Phase.STARTING) for status in found):
            behind.append(lost_steps(found, args.ranks))
        period = max(period, *(s.span_steps for s in found))
        killer.look(found)
    return behind, period


def start(args: argparse.Namespace, home: Path) -> subprocess.Popen[bytes]:
    script = home / "train.py"
    script.write_text(PROGRAM)
    environment = os.environ | {
        "KEEPSTEP_ARENA_DIR": str(home),
        "KEEPSTEP_STATE_DIR": str(home / "state"),
        "KEEPSTEP_JOB": "point",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "keepstep.cli.main", "run"]
    command += ["--standby", str(int(args.kills > 0)), "--max-restarts", str(10 * args.kills + 3)]
    command += ["--nproc-per-node", str(args.ranks), str(script)]
    command += map(str, (args.mib, args.steps, args.step_s))
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


class Killer:
    """Kills ranks, spread over the steps that are left after the warm-up. `cost`: of each, the
    completed steps that were lost."""

    def __init__(self, args: argparse.Namespace, journal: JournalTail) -> None:
        moments = random.Random(args.seed)
        span = (1 - WARM_UP) * 0.9 * args.steps / max(1, args.kills)
        self._at_steps = [
            WARM_UP * args.steps + span * (number + moments.random() / 2)
            for number in range(args.kills)
        ]
        self._ranks = args.ranks
        self._journal = journal
        self._votes: list[int] = []
        self._calm_from_step = 0
        self._killed = 0
        self._delay_s = [moments.uniform(0, args.step_s) for _ in range(args.kills)]

    @property
    def cost(self) -> list[int]:
        return self._votes[1:]  # the first one is the job's beginning

    def read(self) -> None:
        for event in self._journal.read():
            if event.kind == "resumed":
                self._votes.append(int(event.data["lost_steps"]))
                self._calm_from_step = int(event.data["step"]) + CALM_STEPS

    def look(self, found: list[RankStatus]) -> None:
        """Kill the next one, if it is its turn."""
        self.read()
        if self._killed == len(self._at_steps) or len(self._votes) <= self._killed:
            return
        completed = min(status.completed_step for status in found)
        if completed < max(self._at_steps[self._killed], self._calm_from_step):
            return
        time.sleep(self._delay_s[self._killed])
        [pid] = [status.pid for status in found if status.rank == self._killed % self._ranks]
        os.kill(pid, signal.SIGKILL)
        self._killed += 1


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
