"""How long a step boundary takes that finds nothing changed but values.

    python benchmarks/gather.py [--tensors 300 1200 5000] [--rounds 40]

For each size two roads take turns behind a training step of a small network: the plan of the last
gather, and the full road. Beside them a yardstick: one visit of each tensor (`data_ptr`), which is
the least that any look at them costs. Times are CPU times of the trainer's thread: a loaded machine
makes them longer (caches, a core's other thread), the ratios less so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keepstep.edge.torch.state import Protected

TENSORS_PER_PARAMETER = 4  # itself, and what AdamW keeps


def training(tensors: int) -> tuple[Protected, Callable[[], None]]:
    """A network of so many tensors with its optimizer's state, and its step."""
    layers = tensors // TENSORS_PER_PARAMETER // 2
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    protected = Protected.of({"model": model, "optimizer": optimizer}, lazy=True)
    optimizer.register_step_post_hook(protected.used_gradients.updated)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()

    return protected, step


def cpu_ms(work: Callable[[], Any]) -> float:
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1e6


def measure(tensors: int, rounds: int) -> None:
    protected, step = training(tensors)
    step()
    found = [item.local for item in protected.gather().items]
    times: dict[str, list[float]] = {"plan": [], "full": [], "visit": []}
    for number in range(rounds):
        step()
        times["plan"].append(cpu_ms(protected.gather))
        times["visit"].append(cpu_ms(lambda: list(map(torch.Tensor.data_ptr, found))))
        if number % 8 == 0:
            protected.forget_plan()
            times["full"].append(cpu_ms(protected.gather))
    words = [
        f"{name} {statistics.median(values):.3f} (least {min(values):.3f})"
        for name, values in times.items()
    ]
    load = os.getloadavg()[0]
    print(f"{len(found):6} tensors, ms: {', '.join(words)}; load {load:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[300, 1200, 5000])
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for tensors in given.tensors:
        measure(tensors, given.rounds)


if __name__ == "__main__":
    main()
