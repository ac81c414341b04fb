"""How long a step boundary takes that finds nothing changed but values.

    python benchmarks/gather.py [--tensors 300 1200 5000] [--rounds 40]
    python benchmarks/gather.py --job  # what a whole job of 5,000 small tensors pays for it

For each size two roads take turns behind a training step of a small network: the plan of the last
gather, and the full road. Beside them a yardstick: one visit of each tensor (`data_ptr`), which is
the least that any look at them costs. Times are CPU times of the trainer's thread: a loaded machine
makes them longer (caches, a core's other thread), the ratios less so.

The job's steps last 100 ms, most of it asleep, as behind an accelerator. Blocks of steps with a
boundary and without one take turns in one process; its slowdown is that of their medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import keepstep
from keepstep.edge.torch.state import Protected

TENSORS_PER_PARAMETER = 4  # itself, and what AdamW keeps
STEP_S = 0.1
BLOCK_STEPS = 20
BLOCKS = 10


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


def job(tensors: int, blocks: int) -> None:
    """A whole job, keeper and all, in a job directory of its own."""
    layers = tensors // TENSORS_PER_PARAMETER // 2
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as arena:
        places = {"arena_dir": arena, "state_dir": f"{arena}/state", "job": "gather"}
        running = keepstep.protect(places, model=model, optimizer=optimizer)
        for number in range(blocks * BLOCK_STEPS):
            is_saved = bool(number // BLOCK_STEPS % 2)
            began = time.perf_counter()
            if is_saved:
                running.step_begin()
            optimizer.zero_grad()
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            time.sleep(max(0.0, STEP_S - (time.perf_counter() - began)))
            if is_saved:
                running.step_end()
            times[is_saved].append(time.perf_counter() - began)
        running.close()
    plain, saved = (statistics.median(times[is_saved]) for is_saved in (False, True))
    load = os.getloadavg()[0]
    print(
        f"{tensors} tensors: step {plain * 1e3:.1f} ms, with a boundary {saved * 1e3:.1f} ms: "
        f"{saved / plain - 1:+.1%}; load {load:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[300, 1200, 5000])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--job", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.job:
        job(given.tensors[-1], BLOCKS)
        return
    for tensors in given.tensors:
        measure(tensors, given.rounds)


if __name__ == "__main__":
    main()
