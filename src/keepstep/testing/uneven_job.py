"""Uneven job: a training of which one rank becomes slow, `python -m keepstep.testing.uneven_job`.

DistributedDataParallel over gloo, one thread a rank, pinned to a processor of its own as far as
there are enough. A step computes for about as long as it is told; from a step on, one rank does so
many times the work in one section. Batches may differ in length, and may tell so. For tests and
benchmarks of what notices that.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

SIDE = 192  # of the matrices a step multiplies: some tenths of a millisecond each
TOKENS = 1024
SECTIONS = ("compute", "data")


def pinned(local_rank: int) -> int:
    """To which processor."""
    processors = sorted(os.sched_getaffinity(0))
    own = processors[local_rank % len(processors)]
    os.sched_setaffinity(0, {own})
    return own


def multiply(times: int, weight: torch.Tensor) -> None:
    with torch.no_grad():
        product = weight
        for _ in range(times):
            product = torch.tanh(product @ weight)


def products_a_ms(weight: torch.Tensor) -> float:
    """Of processor time, not of wall time: others use the machine, too."""
    multiply(100, weight)
    began_s = time.thread_time()
    multiply(400, weight)
    return 400 / (1e3 * (time.thread_time() - began_s))


def train(args: argparse.Namespace) -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if args.pin:
        pinned(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(args.seed)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    speed = torch.zeros(1)
    weight = torch.randn(SIDE, SIDE) * 1.5 / SIDE**0.5  # so that it neither dies out nor grows
    if size > 1:
        if args.foreign_group:
            torch.distributed.init_process_group("gloo")
        else:
            keepstep.init_process_group()
        speed += products_a_ms(weight)
        torch.distributed.all_reduce(speed)  # all are to do the same
        speed /= size
        model = DistributedDataParallel(model)
    else:
        speed += products_a_ms(weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = keepstep.protect(model=model, optimizer=optimizer)
    lengths = random.Random(1000 * args.seed + rank)
    usual = {"compute": args.compute_ms, "data": args.data_ms}
    products = {section: ms * float(speed) for section, ms in usual.items()}
    for step in job.steps(args.steps):
        is_slow = rank == args.slow_rank and args.slow_from <= step < args.slow_until
        more = {s: args.factor if is_slow and s == args.section else 1.0 for s in SECTIONS}
        multiply(round(products["data"] * more["data"]), weight)
        with step:
            length = lengths.uniform(args.shortest, 1.0)
            batch = torch.randn(max(1, int(32 * length)), 64)
            multiply(round(products["compute"] * length * more["compute"]), weight)
            if is_slow and args.sleep_ms:
                time.sleep(args.sleep_ms / 1e3)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if args.tells_tokens:
                job.report(tokens=int(TOKENS * length))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("--steps", type=int, default=400)
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--compute-ms", type=float, default=25.0)
    found.add_argument("--data-ms", type=float, default=1.0)
    found.add_argument("--slow-rank", type=int, default=-1)
    found.add_argument("--slow-from", type=int, default=200)
    found.add_argument("--slow-until", type=int, default=1 << 30)
    found.add_argument("--factor", type=float, default=1.5, help="of that section's work")
    found.add_argument("--section", choices=SECTIONS, default="compute")
    found.add_argument("--sleep-ms", type=float, default=0.0, help="in the slow rank's steps")
    found.add_argument("--shortest", type=float, default=1.0, help="a batch, of the longest")
    found.add_argument("--tells-tokens", action="store_true")
    found.add_argument("--pin", action="store_true", help="each rank to a processor")
    found.add_argument("--foreign-group", action="store_true", help="torch's own process group")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    train(parser().parse_args(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
