"""What does it save that data-parallel replicas keep one snapshot between them?

Jobs of 1, 2 and 4 ranks under DDP, each saving every step: whole copies beside shares, in turns, so
that the machine's noise hits both alike. Of each the bytes that a rank copies out of its live
tensors in a step (what crosses the bus, where the tensors are on a device), the memory that its
slots take, what the trainer waited in a step, how long the copy took beside it, and the step.

    python benchmarks/replicas.py                 # a table
    python benchmarks/replicas.py --json --rounds 3 --width 2048

The ranks share two cores where that is all there is: steps of four ranks are no measure of four
machines. Bytes and memory are exact wherever they are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script

RANKS = (1, 2, 4)
HOW = ("off", "node")
WARM_STEPS = 12  # by then replicas have found each other
PATIENCE_S = 600.0


def train(width: int, layers: int, steps: int, results: Path) -> None:
    """One rank, started by `keepstep run`."""
    import time

    import torch
    import torch.distributed as dist

    import keepstep
    from keepstep.config import job_dir_of
    from keepstep.edge.shm.memory import MEMORY
    from keepstep.edge.shm.slot import slot_paths
    from keepstep.edge.torch.capture import TensorCopy

    torch.set_num_threads(1)
    keepstep.init_process_group()
    torch.manual_seed(0)
    layers_ = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
    model: torch.nn.Module = torch.nn.Sequential(*layers_)
    if dist.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    copies: list[TensorCopy] = []
    begin = TensorCopy.copy_moving

    def copy_moving(copy: TensorCopy) -> None:
        copies.append(copy)
        begin(copy)

    TensorCopy.copy_moving = copy_moving  # type: ignore[method-assign]
    job = keepstep.protect(model=model, optimizer=optimizer)
    step_s, stall_s = [], []
    for step in job.steps(steps):
        began = time.perf_counter()
        with step:
            optimizer.zero_grad()
            model(torch.randn(64, width)).square().mean().backward()
            optimizer.step()
        page = job._rank._page.read()
        assert page is not None
        step_s.append(time.perf_counter() - began)
        stall_s.append(page.stall_ns_last / 1e9)
        job._drain(job._rank.drain, 60)  # each step is captured, however short it is
    page = job._rank._page.read()
    assert page is not None
    paths = slot_paths(
        MEMORY, job_dir_of(Path(os.environ["KEEPSTEP_ARENA_DIR"]), "replicas"), job.rank
    )
    late = [copy for copy in copies if copy.copy_ns][WARM_STEPS:]
    told = {
        "state_bytes": page.payload_bytes,
        "copied_bytes": statistics.median(copy.copied_bytes for copy in late),
        "slot_bytes": sum(MEMORY.size(path) for path in paths),
        "slots": len(paths),
        "copy_s": statistics.median(copy.copy_ns for copy in late) / 1e9,
        "stall_s": statistics.median(stall_s[WARM_STEPS:]),
        "step_s": statistics.median(step_s[WARM_STEPS:]),
        "torn": page.torn_steps,
    }
    (results / f"rank-{job.rank}.json").write_text(json.dumps(told))
    dist.barrier()
    job.close()


def run(args: argparse.Namespace, ranks: int, how: str) -> Mapping[str, float]:
    """The median rank of one job."""
    room = Path(tempfile.mkdtemp(prefix="replicas-", dir="/dev/shm"))
    try:
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "KEEPSTEP_JOB": "replicas",
            "KEEPSTEP_ARENA_DIR": str(room),
            "KEEPSTEP_STATE_DIR": str(room / "state"),
            "KEEPSTEP_SHARE_REPLICAS": how,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = [sys.executable, "-m", "keepstep.cli.main", "run"]
        command += ["--nproc-per-node", str(ranks), str(Path(__file__)), "--train", str(room)]
        command += ["--width", str(args.width), "--layers", str(args.layers)]
        command += ["--steps", str(args.steps)]
        done = subprocess.run(
            command, env=environ, timeout=PATIENCE_S, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{ranks} ranks, {how}: {done.stdout}\n{done.stderr}")
        told = [json.loads((room / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        return {name: statistics.median(one[name] for one in told) for name in told[0]}
    finally:
        shutil.rmtree(room, ignore_errors=True)


def table(found: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"{'ranks':>5} {'':>5} {'copied a rank':>14} {'memory a rank':>14} {'stall':>9} "
        f"{'copy':>9} {'step':>9}"
    ]
    for row in found:
        lines.append(
            f"{row['ranks']:>5} {row['how']:>5} {row['copied_bytes'] / 2**20:>10.1f} MiB "
            f"{row['slot_bytes'] / 2**20:>10.1f} MiB {1e3 * row['stall_s']:>6.2f} ms "
            f"{1e3 * row['copy_s']:>6.2f} ms {1e3 * row['step_s']:>6.1f} ms"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.width, args.layers, args.steps, Path(args.train))
        return
    watch = harness.watch()
    names = [f"{ranks} {how}" for ranks in RANKS for how in HOW]
    runs: dict[str, list[Mapping[str, float]]] = {name: [] for name in names}
    for row in harness.turns(names, args.rounds):
        for name in row:
            ranks, how = name.split()
            runs[name].append(run(args, int(ranks), how))
    found = []
    for name, several in runs.items():
        ranks, how = name.split()
        medians = {key: statistics.median(one[key] for one in several) for key in several[0]}
        found.append({"ranks": int(ranks), "how": how, **medians})
    harness.tell(watch.end(), {"rows": found}, args.json, lambda _: print(table(found)))


if __name__ == "__main__":
    main()
