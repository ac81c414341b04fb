"""How long a step boundary takes that finds nothing changed but values.

    python benchmarks/gather.py [--tensors 300 1200 5000] [--rounds 40]
    python benchmarks/gather.py --job  # what a whole job of 5,000 small tensors pays for it

For each size two roads take turns behind a training step of a small network: the plan of the last
gather, and the full road. Beside them a yardstick: one visit of each tensor (`data_ptr`), which is
the least that any look at them costs. Times are CPU times of the trainer's thread: a loaded machine
makes them longer (caches, a core's other thread), the ratios less so.

The job's steps last 100 ms, most of it asleep, as behind an accelerator. Three blocks of steps take
turns in one process: with a boundary; without one; of a twin that keepstep knows nothing of. The
slowdown is that of their medians. The hooks in front of and behind an update are in both of the
former. Beside it the CPU time of the thread that copies.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script
import torch
from torch import nn

import keepstep
from keepstep.edge.torch.state import Protected

TENSORS_PER_PARAMETER = 4  # itself, and what AdamW keeps
STEP_S = 0.1
BLOCK_STEPS = 20
BLOCKS = 15
KINDS = ("boundary", "none", "twin")


def network(tensors: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Of so many tensors with its optimizer's state, and its step."""
    layers = tensors // TENSORS_PER_PARAMETER // 2
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def training(tensors: int) -> tuple[Protected, Callable[[], None]]:
    """What `protect` would make of it, and its step."""
    model, optimizer, step = network(tensors)
    protected = Protected.of({"model": model, "optimizer": optimizer}, lazy=True)
    optimizer.register_step_post_hook(protected.used_gradients.updated)
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


def capture_cpu_ms() -> float:
    """What the thread that copies has computed so far."""
    for thread in threading.enumerate():
        if thread.name == "keepstep-capture":
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            return int(text.split()[0]) / 1e6
    raise LookupError("no thread of this process copies")


def job(tensors: int, blocks: int) -> None:
    """A whole job, keeper and all, in a job directory of its own."""
    model, optimizer, step = network(tensors)
    _, _, twins_step = network(tensors)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as arena:
        places = {"arena_dir": arena, "state_dir": f"{arena}/state", "job": "gather"}
        running = keepstep.protect(places, model=model, optimizer=optimizer)
        for number in range(blocks * BLOCK_STEPS):
            kind = KINDS[number // BLOCK_STEPS % len(KINDS)]
            began = time.perf_counter()
            if kind == "boundary":
                running.step_begin()
            (twins_step if kind == "twin" else step)()
            time.sleep(max(0.0, STEP_S - (time.perf_counter() - began)))
            if kind == "boundary":
                running.step_end()
            times[kind].append(time.perf_counter() - began)
        captured, skipped, torn = running._rank._capture.counts
        copying_ms = capture_cpu_ms() / captured
        running.close()
    saved, plain, twin = (statistics.median(times[kind]) * 1e3 for kind in KINDS)
    load = os.getloadavg()[0]
    print(
        f"{tensors} tensors: step of the twin {twin:.1f} ms, without a boundary {plain:.1f} ms, "
        f"with one {saved:.1f} ms: {saved / plain - 1:+.1%} to that, {saved / twin - 1:+.1%} to "
        f"the twin; {captured} steps captured, {skipped} skipped, {torn} torn; the copying thread "
        f"{copying_ms:.2f} CPU ms each, {copying_ms / tensors * 1e3:.2f} us a tensor; "
        f"load {load:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[300, 1200, 5000])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--job", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    watch = harness.watch()
    if given.job:
        job(given.tensors[-1], BLOCKS)
    else:
        for tensors in given.tensors:
            measure(tensors, given.rounds)
    harness.tell(watch.end())


if __name__ == "__main__":
    main()
