"""What a node's keeper is told of the collectives of two ranks on one device.

    KEEPSTEP_UNTESTED_NCCL_GROUPS=1 keepstep run --nproc-per-node 2 benchmarks/gpu/rhythm.py
    KEEPSTEP_UNTESTED_NCCL_GROUPS=1 python -m benchmarks.gpu.rhythm lab [RATE]

**Under `keepstep run`**: idle time of a step as the page tells it, beside timing events of the
program's own; how much of the time the pulse says that the network is busy, asked each millisecond;
what telling costs the thread that orders a collective.

**`lab`**: two nodes behind links of that rate (500mbit), needs root and `ip netns`. Both train DDP
on the same device, NCCL over sockets; steps without redundancy, with copies sent at once, with
copies interleaved, in turns, there and back.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("RANK", "-1"))
if RANK >= 0:
    # NCCL refuses two ranks on one device, but for those of different hosts, which meet by sockets
    os.environ["NCCL_HOSTID"] = f"h{RANK}"
    os.environ.setdefault("NCCL_IB_DISABLE", "1")

import torch  # noqa: E402  NCCL reads what is set above
import torch.distributed as dist  # noqa: E402

import keepstep  # noqa: E402
from keepstep.edge.shm.collective_profile_page import (  # noqa: E402
    CollectiveProfileReader,
    profile_path,
)
from keepstep.edge.shm.memory import MEMORY  # noqa: E402
from keepstep.edge.torch.membership import membership  # noqa: E402

STEPS, FROM = 60, 25
BEFORE, BEHIND = 60_000_000, 30_000_000  # cycles of the device: some 35 and 17 ms
CASES = {
    "alone": ("off", "off"),
    "at once": ("copies:2", "off"),
    "interleaved": ("copies:2", "auto"),
}


def say(name: str, **figures: Any) -> None:
    words = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
    print(f"{name}: {'  '.join(words)}", flush=True)


def mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def told() -> None:
    device = torch.device("cuda", RANK % torch.cuda.device_count())
    torch.cuda.set_device(device)
    keepstep.init_process_group(device_id=device)
    weight = torch.nn.Parameter(torch.zeros(1 << 20, device=device))
    optimizer = torch.optim.SGD([weight], 1e-3)
    job = keepstep.protect(weight=weight, optimizer=optimizer)
    gradient = torch.ones(4 << 20, device=device)
    page = CollectiveProfileReader(MEMORY, profile_path(job._rank._options.job_dir, RANK))
    pulses: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(0.001):
            pulse = page.pulse(time.monotonic_ns())
            if pulse is not None and pulse.step >= FROM:
                pulses.append(pulse.pending)

    asks = threading.Thread(target=ask, daemon=True)
    asks.start()
    marks: list[list[torch.cuda.Event]] = []
    for _ in job.steps(STEPS):
        at = [mark()]
        torch.cuda._sleep(BEFORE)
        at.append(mark())
        work = dist.all_reduce(gradient, async_op=True)
        assert work is not None
        work.wait()
        at.append(mark())
        torch.cuda._sleep(BEHIND)
        optimizer.step()
        marks.append(at)
        if len(marks) > 3:  # a loop that logs what was three steps ago
            marks[-3][0].synchronize()
    torch.cuda.synchronize()
    is_over.set()
    asks.join()
    _compare(page, marks, pulses)
    _cost(device)
    job.close()


def _compare(
    page: CollectiveProfileReader, marks: list[list[torch.cuda.Event]], pulses: list[int]
) -> None:
    spans = [
        (
            began.elapsed_time(before),
            before.elapsed_time(behind),
            behind.elapsed_time(following[0]),
        )
        for (began, before, behind), following in zip(marks[FROM:], marks[FROM + 1 :], strict=False)
    ]
    before_ms, busy_ms, behind_ms = (statistics.mean(some) for some in zip(*spans, strict=True))
    seen = [step for step in page.steps() if step.step >= FROM]
    lengths: dict[int, list[float]] = {}
    for step in seen:
        for gap in step.gaps:
            lengths.setdefault(gap.index, []).append((gap.ended_ns - gap.began_ns) / 1e6)
    say(
        "rhythm",
        rank=RANK,
        steps=len(seen),
        collectives={step.collectives for step in seen},
        own_ms=[round(ms, 2) for ms in (before_ms, busy_ms, behind_ms)],
        told_ms={k: round(statistics.mean(v), 2) for k, v in lengths.items()},
        busy_share=busy_ms / (before_ms + busy_ms + behind_ms),
        pulse_busy_share=statistics.mean(pulses) if pulses else -1.0,
        pulses=len(pulses),
    )


def _cost(device: torch.device) -> None:
    """Of 40 small collectives each, in turns."""
    small = torch.zeros(8, device=device)
    hooks = membership.on_order, membership.on_queued
    took: dict[str, list[float]] = {"told": [], "not_told": []}
    for number in range(20):
        for name in list(took)[:: 1 if number % 2 else -1]:
            if name == "told":
                membership.on_order, membership.on_queued = hooks
            else:
                membership.on_order, membership.on_queued = (
                    (lambda: None),
                    (lambda began, end: None),
                )
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(40):
                dist.all_reduce(small, async_op=True)
            took[name].append((time.perf_counter() - began) / 40 * 1e6)
            torch.cuda.synchronize()
    say("cost_us", **{name: statistics.median(found) for name, found in took.items()})


def trained() -> None:
    """A rank of the lab."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    keepstep.init_process_group(device_id=device)
    torch.manual_seed(RANK)
    layers = [torch.nn.Linear(512, 512) for _ in range(8)]
    model = torch.nn.Sequential(*layers).to(device)
    own = torch.randn(2_000_000, device=device)  # which no other rank has
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2)
    optimizer = torch.optim.AdamW(model.parameters())
    job = keepstep.protect(model=model, optimizer=optimizer, own=own)
    marks = []
    for _ in job.steps(STEPS):
        torch.cuda._sleep(300_000_000)  # some 170 ms
        own.add_(1.0)
        ddp(torch.randn(4, 512, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.append(mark())
        if len(marks) > 3:
            marks[-3].synchronize()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks[FROM:], marks[FROM + 1 :], strict=False)]
    if RANK == 0:
        page = job._rank._page.read()
        found = {"ms": statistics.median(times), "captured": page.captured_steps}
        Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(found))
    job.close()


def lab(rate: str = "500mbit", rounds: str = "2") -> None:
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(int(rounds)):
        for name in list(CASES)[:: 1 if number % 2 == 0 else -1]:
            policy, interleave = CASES[name]
            with tempfile.TemporaryDirectory(prefix="rhythm-") as room:
                words = ["lab", "run", "--nodes", "2", "--policy", policy, "--rate", rate]
                environ = {
                    **os.environ,
                    "KEEPSTEP_INTERLEAVE": interleave,
                    "BENCH_RESULT": f"{room}/result",
                    "RHYTHM_LAB": "1",
                    "NCCL_P2P_DISABLE": "1",
                    "NCCL_SHM_DISABLE": "1",
                }
                done = subprocess.run(
                    [sys.executable, "-m", "keepstep.cli.main", *words, "--work", room, __file__],
                    env=environ,
                    check=False,
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                if done.returncode:
                    say("failed", case=name, rc=done.returncode)
                    print(done.stdout[-1500:], done.stderr[-3000:], flush=True)
                    return
                found = json.loads(Path(room, "result").read_text())
                taken[name].append(found["ms"])
                say("lab", case=name.replace(" ", "_"), **found)
                for path in Path(room).rglob("journal.jsonl"):
                    for line in path.read_text().splitlines():
                        if '"interleave"' in line:
                            print(json.loads(line).get("why", "")[:200], flush=True)
    say("lab_median_ms", **{k.replace(" ", "_"): statistics.median(v) for k, v in taken.items()})


if __name__ == "__main__":
    if RANK < 0:
        lab(*sys.argv[2:])
    elif "RHYTHM_LAB" in os.environ:
        trained()
    else:
        told()
