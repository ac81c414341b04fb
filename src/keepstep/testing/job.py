"""Job: the small deterministic training a drill runs, `python -m keepstep.testing.job`.

It holds one of everything that a restore can get wrong: batch statistics, dropout, Adam's moments,
a schedule, a shuffled sampler with a position, all three generators of random numbers, and a trail
that hashes every step's loss and samples into the one before, so that a step left out or done twice
shows in the end. Its last word is one digest a rank.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import keepstep
from keepstep.edge.os.needs import has_package
from keepstep.runtime.rank import session
from keepstep.testing.allowance import Allowance
from keepstep.testing.injector import FaultPlan, Injector
from keepstep.testing.number_faults import NumberFaults
from keepstep.testing.slowness import Slowness
from keepstep.testing.stopwatch import Stopwatch

EXAMPLES, FEATURES, BATCH = 512, 32, 16
# torch does without it, and so does a drill: then there are two generators of random numbers
numpy: Any = importlib.import_module("numpy") if has_package("numpy") else None


class Order:
    """Which examples come next: a new shuffle an epoch, and a position in it."""

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self.epoch = self.position = 0

    def next(self) -> torch.Tensor:
        take = BATCH * self._world_size
        if self.position + take > EXAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
        shuffled = torch.randperm(
            EXAMPLES, generator=torch.Generator().manual_seed(self._seed + self.epoch)
        )
        begin = self.position + BATCH * self._rank
        self.position += take
        return shuffled[begin : begin + BATCH]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def network(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)),
        nn.Linear(width, FEATURES),
    )


def digest(value: Any) -> str:
    """SHA-256 over a state: every type, key, shape and byte of it. Lists and tuples count as
    equal."""
    into = hashlib.sha256()
    _feed(into, value)
    return into.hexdigest()


def _feed(into: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        into.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        whole = value.detach().contiguous()
        into.update(ctypes.string_at(whole.data_ptr(), whole.nbytes))
    elif numpy is not None and isinstance(value, numpy.ndarray):
        into.update(f"array {value.dtype} {value.shape} ".encode())
        into.update(value.tobytes())
    elif isinstance(value, dict):
        into.update(f"dict {len(value)} ".encode())
        for key in sorted(value, key=repr):
            into.update(f"{key!r} ".encode())
            _feed(into, value[key])
    elif isinstance(value, (list, tuple)):
        into.update(f"sequence {len(value)} ".encode())
        for item in value:
            _feed(into, item)
    else:
        into.update(f"{type(value).__name__} {value!r} ".encode())


def loss_in(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(pair[0]) - pair[1]).square().mean()


def prepare(args: argparse.Namespace, rank: int) -> tuple[torch.Tensor, nn.Module]:
    """The data and the bare model, which all ranks have alike, and generators, which each has."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    data, model = torch.randn(EXAMPLES, FEATURES), network(args.width)
    random.seed(args.seed + rank)
    if numpy is not None:
        numpy.random.seed(args.seed + rank)
    torch.manual_seed(args.seed + rank)
    return data, model


def train(
    args: argparse.Namespace,
    before_end: Callable[[], None],
    numbers: NumberFaults | None = None,
) -> str:
    """Run to the end and return this rank's digest. `before_end`: what comes before the last word
    to the keeper. `numbers`: what makes some of them wrong."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    data, model = prepare(args, rank)
    if world_size > 1:
        keepstep.init_process_group()
        # Rebuilt buckets would add in another order after a restart than before it; with more than
        # two ranks that shows.
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=world_size > 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    order = Order(args.seed, rank, world_size)
    numbers = numbers or NumberFaults()
    numbers.attach(model, optimizer)
    job = keepstep.protect(
        model=model, optimizer=optimizer, scheduler=schedule, sampler=order, trail=""
    )
    pause_s = args.step_ms / 3000
    allowance = None if args.until is None else Allowance(args.until)
    every = args.buddy_every
    loss_of = job.buddy(model, loss_in, every) if every else partial(loss_in, model)
    for step in job.steps(args.steps if allowance is None else sys.maxsize):
        if allowance is not None and not allowance.covers(step):
            break
        with step:
            job.enter("forward")
            time.sleep(pause_s)
            chosen = order.next()
            batch = data[chosen] * (1 + random.random())
            if numpy is not None:
                batch += torch.from_numpy(numpy.random.normal(0, 0.01, (BATCH, FEATURES))).float()
            batch = numbers.batch(batch + 0.01 * torch.randn_like(batch))
            loss = loss_of((batch, data[chosen]))
            job.enter("backward")
            optimizer.zero_grad()
            loss.backward()
            time.sleep(pause_s)
            job.enter("update")
            optimizer.step()
            schedule.step()
            time.sleep(pause_s)
            job.state["trail"] = digest([job.state["trail"], int(step), loss, chosen])
            job.report(loss=loss)
            if args.persist_every and (step + 1) % args.persist_every == 0:
                # a fault in the store needs something in the store
                futures.wait([job.persist()], args.persist_s)
    before_end()
    if allowance is not None:
        job.close()
    states = [
        model.state_dict(),
        optimizer.state_dict(),
        schedule.state_dict(),
        order.state_dict(),
        job.state["trail"],
    ]
    if numpy is not None:
        states.append(numpy.random.get_state())
    return digest([*states, torch.get_rng_state(), random.getstate()])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m keepstep.testing.job",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--width", type=int, default=64, help="of the network: the state grows with its square"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="how long a step sleeps, in three parts"
    )
    parser.add_argument(
        "--persist-every",
        type=int,
        default=0,
        help="call job.persist() every so many steps, and wait for it",
    )
    parser.add_argument(
        "--persist-s", type=float, default=3.0, help="the longest a step waits for its checkpoint"
    )
    parser.add_argument(
        "--buddy-every",
        type=int,
        default=0,
        help="have one rank's gradient computed by another one, too, every so many steps",
    )
    parser.add_argument(
        "--until",
        type=Path,
        help="train as far as that file allows; --steps is then the schedule's length alone",
    )
    parser.add_argument(
        "--results", type=Path, required=True, help="directory for the digest of each rank"
    )
    parser.add_argument("--plan", type=Path, help="faults to inject (written by keepstep drill)")
    args = parser.parse_args(argv)
    rank = os.environ.get("RANK", "0")
    injector: Injector | None = None
    numbers: NumberFaults | None = None
    if args.plan:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        plan = FaultPlan.read(args.plan, os.environ)
        if plan.phases is not None:
            session.phase_listeners.append(Stopwatch(plan.phases, plan.job_dir, int(rank)))
        injector = Injector(plan, int(rank), local_rank)
        session.phase_listeners.append(injector)
        numbers = NumberFaults(plan, int(rank))
        session.phase_listeners.append(numbers)
        session.phase_listeners.append(Slowness(plan, int(rank), args.step_ms))
    result = train(args, _nothing if injector is None else injector.await_keeper, numbers)
    done, unfinished = args.results / f"rank-{rank}.json", args.results / f"rank-{rank}.new"
    unfinished.write_text(json.dumps({"digest": result}))
    unfinished.rename(done)


def _nothing() -> None:
    """Nobody disturbs this job."""


if __name__ == "__main__":
    main()
