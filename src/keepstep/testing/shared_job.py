"""Shared job: a training whose ranks share micro-batches, `python -m keepstep.testing.shared_job`.

DistributedDataParallel over gloo. Computing is emulated by sleeping, so that any number of ranks
runs on any number of processors; gradients are real ones. From a step on, one rank sleeps so many
times as long. Each rank writes what became of it: `rank-<r>.json` with the hash of its state and
how long each step took. For tests and benchmarks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

WIDTH, SAMPLES = 32, 8


def batch_of(step: int, micro: int) -> torch.Tensor:
    """A micro-batch, whoever computes it."""
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1000 * step + micro))


def even(total: int, model: Any, rank: int, size: int) -> Iterator[tuple[int, float]]:
    """What a program without `job.micro_batches` does."""
    own = range(rank * total // size, (rank + 1) * total // size)
    for micro in own:
        with ExitStack() as local:
            if micro != own[-1]:
                local.enter_context(model.no_sync())
            yield micro, size / total


def state_hash(*parts: Any) -> str:
    """Of tensors, wherever they are in it."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(
                value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                add(one)

    for part in parts:
        add(part.state_dict())
    return found.hexdigest()


def train(args: argparse.Namespace) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    keepstep.init_process_group()
    torch.manual_seed(args.seed + rank)  # dropout of each rank's own
    bare = nn.Sequential(
        nn.Linear(WIDTH, args.hidden), nn.Dropout(0.2), nn.Tanh(), nn.Linear(args.hidden, 1)
    )
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = keepstep.protect(model=model, optimizer=optimizer)
    took_ns: dict[int, int] = {}
    for step in job.steps(args.steps):
        began_ns = time.perf_counter_ns()
        is_slow = rank == args.slow_rank and args.slow_from <= step < args.slow_until
        pause_s = args.micro_ms / 1e3 * (args.factor if is_slow else 1)
        with step:
            optimizer.zero_grad()
            shared = (
                even(args.total, model, rank, size)
                if args.even
                else (
                    (int(micro), micro.weight)
                    for micro in job.micro_batches(args.total, in_order=not args.any_order)
                )
            )
            for micro, weight in shared:
                time.sleep(pause_s)
                (model(batch_of(step, micro)).square().mean() * weight).backward()
            optimizer.step()
        took_ns[int(step)] = time.perf_counter_ns() - began_ns
    told = {"hash": state_hash(model, optimizer), "took_ns": took_ns}
    Path(args.results, f"rank-{rank}.json").write_text(json.dumps(told))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("results", help="a directory")
    found.add_argument("--steps", type=int, default=120)
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--total", type=int, default=28, help="micro-batches a step")
    found.add_argument("--micro-ms", type=float, default=2.0, help="that one takes")
    found.add_argument("--hidden", type=int, default=64, help="size of the model")
    found.add_argument("--slow-rank", type=int, default=-1)
    found.add_argument("--slow-from", type=int, default=40)
    found.add_argument("--slow-until", type=int, default=1 << 30)
    found.add_argument("--factor", type=float, default=2.0, help="that it takes the slow rank")
    found.add_argument("--any-order", action="store_true", help="in_order=False")
    found.add_argument("--even", action="store_true", help="without job.micro_batches")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    train(parser().parse_args(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
