"""A training that gives model and optimizer to `protect`, and forgets much: each thing that is told
by its name on the command line."""

from __future__ import annotations

import copy
import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy
import torch
from torch import nn

import keepstep

FORGOTTEN = set(sys.argv[1:])
if "module_global" in FORGOTTEN:
    samples = 0


class Tally:
    total = 0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Batches:
    def __init__(self) -> None:
        self.position = 0


def stream() -> Iterator[float]:
    value = 1.0
    while True:
        value *= 0.9
        yield value


def counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def remembers(loss: float, best: list[float] = [9e9]) -> float:  # noqa: B006
    best[0] = best[0] * 0.5 + loss
    return best[0]


def forgotten(name: str) -> bool:
    return name in FORGOTTEN


def train() -> None:
    global samples
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    make: dict[str, Callable[[], object]] = {
        "ema": lambda: copy.deepcopy(model),
        "batches": Batches,
        "torch_generator": lambda: torch.Generator().manual_seed(1),
        "python_generator": lambda: random.Random(2),
        "numpy_generator": lambda: numpy.random.default_rng(3),
        "closure": counter,
        "scheduler": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "slotted": Slotted,
        "running": stream,
        "numbers": itertools.count,
        "recent": lambda: deque([0.0] * 64, maxlen=64),
        "statistics": lambda: {"mean": torch.zeros(3)},
    }
    locals_ = {name: made() for name, made in make.items() if forgotten(name)}
    ema, batches, torch_generator, python_generator = (
        locals_.get(n) for n in ("ema", "batches", "torch_generator", "python_generator")
    )
    numpy_generator, closure, scheduler, slotted = (
        locals_.get(n) for n in ("numpy_generator", "closure", "scheduler", "slotted")
    )
    running, numbers, recent, statistics = (
        locals_.get(n) for n in ("running", "numbers", "recent", "statistics")
    )
    del locals_, make
    stopwatch = [0.0]
    losses = []
    job = keepstep.protect(model=model, optimizer=optimizer)
    for step in job.steps(30):
        with step:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        if ema is not None:
            for kept, live in zip(ema.parameters(), model.parameters(), strict=True):
                kept.data.lerp_(live.data, 0.1)
        if batches is not None:
            batches.position += 4
        if torch_generator is not None:
            torch.rand(2, generator=torch_generator)
        if python_generator is not None:
            python_generator.random()
        if numpy_generator is not None:
            numpy_generator.random()
        if closure is not None:
            closure()
        if scheduler is not None:
            scheduler.step()
        if slotted is not None:
            slotted.scale *= 1.1
        if running is not None:
            next(running)
        if numbers is not None:
            next(numbers)
        if recent is not None:
            recent.append(losses[-1])
        if statistics is not None:
            statistics["mean"] += 1
        if forgotten("module_global"):
            samples += 4
        if forgotten("class_attribute"):
            Tally.total += 1
        if forgotten("default"):
            remembers(losses[-1])
        if forgotten("attribute"):
            model.seen = getattr(model, "seen", 0) + 1
        if forgotten("clock"):
            stopwatch[0] = time.time()


train()
