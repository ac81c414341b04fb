"""Partial job: a training whose ranks do not wait for the slowest, `python -m
keepstep.testing.partial_job`.

DistributedDataParallel over gloo, by `job.partial_sum` or by `job.local_steps`. Computing is
emulated by sleeping, so that any number of ranks runs on any number of processors; gradients are
real ones. From a step on, one rank sleeps so many times as long. Each rank writes what became of
it: `rank-<r>.json` with the hash of its state, how long each step took and the loss of a batch that
nobody trains on. For tests and benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.testing.shared_job import WIDTH, batch_of, state_hash

WAYS = ("partial", "local", "all")
UNSEEN = 10**6  # a step that nobody trains


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of that rank's batch: to find the sign of what a fixed layer makes of it."""
    batch = batch_of(step, rank)
    wanted = torch.sin(batch.sum(1, keepdim=True))
    return (model(batch) - wanted).square().mean()


def train(args: argparse.Namespace) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    keepstep.init_process_group()
    torch.manual_seed(args.seed)
    bare = nn.Sequential(
        nn.Linear(WIDTH, args.hidden), nn.Dropout(0.1), nn.Tanh(), nn.Linear(args.hidden, 1)
    )
    torch.manual_seed(args.seed + rank)  # dropout of each rank's own
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = keepstep.protect(model=model, optimizer=optimizer)
    took_ns: dict[int, int] = {}

    def compute(step: int) -> None:
        is_slow = rank == args.slow_rank and step >= args.slow_from
        time.sleep(args.compute_ms / 1e3 * (args.factor if is_slow else 1))
        loss_of(model, step, rank).backward()

    for step in job.steps(args.steps):
        began_ns = time.perf_counter_ns()
        with step:
            optimizer.zero_grad()
            if args.way == "partial":
                need = args.need or size - 1
                for _ in job.partial_sum(
                    need, wait_s=args.wait_s, late=args.late, replay=args.replay
                ):
                    compute(step)
                optimizer.step()
            elif args.way == "local":
                with job.local_steps(args.every):
                    compute(step)
                    optimizer.step()
            else:
                compute(step)
                optimizer.step()
        took_ns[int(step)] = time.perf_counter_ns() - began_ns
    bare.eval()
    with torch.no_grad():
        losses = [loss_of(bare, UNSEEN + number, 0).item() for number in range(32)]
    told = {
        "hash": state_hash(model, optimizer),
        "random": torch.get_rng_state().tolist()[:64],
        "took_ns": took_ns,
        "loss": sum(losses) / len(losses),
    }
    Path(args.results, f"rank-{rank}.json").write_text(json.dumps(told))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("results", help="a directory")
    found.add_argument("--way", choices=WAYS, default="partial")
    found.add_argument("--steps", type=int, default=120)
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--compute-ms", type=float, default=10.0, help="of a step")
    found.add_argument("--hidden", type=int, default=64, help="size of the model")
    found.add_argument("--slow-rank", type=int, default=-1)
    found.add_argument("--slow-from", type=int, default=40)
    found.add_argument("--factor", type=float, default=2.0, help="that it takes the slow rank")
    found.add_argument("--need", type=int, default=0, help="0: all ranks but one")
    found.add_argument("--wait-s", type=float, default=0.0)
    found.add_argument("--late", choices=("drop", "add"), default="drop")
    found.add_argument("--replay", help="a record of partial sums")
    found.add_argument("--every", type=int, default=8, help="steps from one mean to the next")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    train(parser().parse_args(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
