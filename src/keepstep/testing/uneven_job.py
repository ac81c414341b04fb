"""Uneven job: a training of which one rank becomes slow, `python -m keepstep.testing.uneven_job`.

DistributedDataParallel over gloo, one thread a rank, pinned to a processor of its own as far as
there are enough. A step computes for about as long as it is told; from a step on, one rank does so
many times the work in one section. What it computes lies in the body, beside the model's passes,
or within one of them, or in the update. Batches may differ in length, and may tell so. What one
product took is the speed of a rank's processor, whatever it had to do, by the program's own clock.
For tests and benchmarks of what notices that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

SIDE = 192  # of the matrices a step multiplies: some tenths of a millisecond each
TOKENS = 1024
SECTIONS = ("compute", "data", "forward", "backward", "update")
VARIES = ("compute", "forward", "backward")  # with a batch's length


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


class ExtraWork:
    """What a section of a step multiplies for nothing, besides what it does anyway."""

    def __init__(self) -> None:
        self.times = 0
        self.took_ns = 0  # of processor time, the last time
        self.weight = torch.randn(SIDE, SIDE) * 1.5 / SIDE**0.5  # neither dies out nor grows

    def __call__(self, *_: object) -> None:
        began_ns = time.thread_time_ns()
        multiply(self.times, self.weight)
        self.took_ns = time.thread_time_ns() - began_ns


class WorkingLayer(nn.Module):
    """A layer that gives what it is given."""

    def __init__(self, forward: ExtraWork, backward: ExtraWork) -> None:
        super().__init__()
        self._in_forward, self._in_backward = forward, backward

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self._in_forward()
        output = given.view_as(given)
        if output.requires_grad:
            output.register_hook(self._in_backward)
        return output


def train(args: argparse.Namespace) -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if args.pin:
        pinned(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(args.seed)
    works = {section: ExtraWork() for section in SECTIONS}
    layer = WorkingLayer(works["forward"], works["backward"])
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), layer, nn.Linear(128, 64))
    speed = torch.zeros(1)
    weight = works["compute"].weight
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
    optimizer.register_step_pre_hook(works["update"])  # behind keepstep's: in the update
    usual = {section: getattr(args, f"{section}_ms") for section in SECTIONS}
    products = {section: ms * float(speed) for section, ms in usual.items()}
    product_ns: list[float] = []
    for step in job.steps(args.steps):
        is_slow = rank == args.slow_rank and args.slow_from <= step < args.slow_until
        length = lengths.uniform(args.shortest, 1.0)
        for section, work in works.items():
            times = products[section] * (args.factor if is_slow and section == args.section else 1)
            work.times = round(times * (length if section in VARIES else 1))
        works["data"]()
        with step:
            batch = torch.randn(max(1, int(32 * length)), 64)
            works["compute"]()
            if is_slow and args.sleep_ms:
                time.sleep(args.sleep_ms / 1e3)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if args.tells_tokens:
                job.report(tokens=int(TOKENS * length))
        times = sum(work.times for work in works.values())
        product_ns.append(sum(work.took_ns for work in works.values()) / max(1, times))
    if args.speeds:
        Path(args.speeds, f"rank-{rank}").write_text(json.dumps(product_ns))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("--steps", type=int, default=400)
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--compute-ms", type=float, default=25.0)
    found.add_argument("--data-ms", type=float, default=1.0)
    found.add_argument("--forward-ms", type=float, default=0.0)
    found.add_argument("--backward-ms", type=float, default=0.0)
    found.add_argument("--update-ms", type=float, default=0.0)
    found.add_argument("--slow-rank", type=int, default=-1)
    found.add_argument("--slow-from", type=int, default=200)
    found.add_argument("--slow-until", type=int, default=1 << 30)
    found.add_argument("--factor", type=float, default=1.5, help="of that section's work")
    found.add_argument("--section", choices=SECTIONS, default="compute")
    found.add_argument("--sleep-ms", type=float, default=0.0, help="in the slow rank's steps")
    found.add_argument("--shortest", type=float, default=1.0, help="a batch, of the longest")
    found.add_argument("--tells-tokens", action="store_true")
    found.add_argument("--pin", action="store_true", help="each rank to a processor")
    found.add_argument("--speeds", help="a directory: what a product took each rank, by step")
    found.add_argument("--foreign-group", action="store_true", help="torch's own process group")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    train(parser().parse_args(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
