"""What does saving every step cost the trainer?

One process, one compute thread, a GPT-like model with AdamW. Blocks of steps alternate between
saving with nothing, with keepstep and with each peer, so that the machine's noise hits all alike;
figures are medians over steps. All of it runs on two cores, and what other processes took of the
machine meanwhile stands below the table, with a warning where that was too much to compare by.

    python benchmarks/stall.py                    # a table
    python benchmarks/stall.py --json --rounds 8  # one JSON document
    python benchmarks/stall.py --peers none       # keepstep only
    python benchmarks/stall.py --model demo       # the iteration of examples/gpt.py

Reported per scheme: median step, slowdown against not saving (the median of each round's ratio),
what the caller waited for, the first save, and the memory taken per byte of state. For keepstep
also the copy's bandwidth against a memcpy of the same bytes measured in this run between the
blocks, and the speed of checksums. `hidden` is what the step after the last save still pays (a step
that saves nothing, following one that did).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import keepstep
from keepstep.edge.shm import memory


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 4 * width),
            torch.nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@dataclass
class Scheme:
    """One way of saving. `save` runs after every step and returns when training may go on; `drain`
    ends what is under way."""

    name: str
    save: Callable[[int], None]
    drain: Callable[[], None] = lambda: None
    step_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    hidden_s: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    first_s: float = 0.0
    memory_ratio: float | None = None


def shm_bytes() -> int:
    stat = os.statvfs("/dev/shm")
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


class Memcpy:
    """The yardstick: one memcpy of as many bytes as the state has, between warm buffers, the
    trainer standing still."""

    def __init__(self, nbytes: int) -> None:
        self.source, self.target = (
            torch.ones(nbytes, dtype=torch.uint8),
            torch.ones(nbytes, dtype=torch.uint8),
        )

    def bytes_per_s(self) -> float:
        began = time.perf_counter()
        memory.copy(self.target.data_ptr(), self.source.data_ptr(), self.source.numel())
        return self.source.numel() / (time.perf_counter() - began)


class Workload:
    """What is trained. `state_bytes` counts parameters and AdamW's two moments."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if args.model == "demo":
            path = Path(__file__).parents[1] / "examples" / "gpt.py"
            spec = importlib.util.spec_from_file_location("gpt", path)
            assert spec is not None and spec.loader is not None
            gpt = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(gpt)
            sizes = gpt.arguments([])
            windows = gpt.read_text().unfold(0, sizes.context + 1, sizes.context)
            sampler = gpt.PositionSampler(len(windows), 0)
            self.model: torch.nn.Module = gpt.GPT(
                sizes.width, sizes.layers, sizes.heads, sizes.context
            )
            self._loss = lambda: self.model(windows[sampler.take(sizes.batch)].long())
        else:
            data = torch.randn(args.batch, args.width)
            self.model = torch.nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
            self._loss = lambda: self.model(data).square().mean()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.state_bytes = sum(p.numel() for p in self.model.parameters()) * 12

    def train_one(self) -> None:
        self.optimizer.zero_grad()
        self._loss().backward()
        self.optimizer.step()


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = Workload(args)
        self.model, self.optimizer = self.work.model, self.work.optimizer
        self.state_bytes, self.train_one = self.work.state_bytes, self.work.train_one
        self.copies: list[float] = []
        self.seals: list[float] = []
        self.directory = Path(tempfile.mkdtemp(prefix="keepstep-bench-", dir=args.directory))

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    # -- schemes

    def keepstep(self) -> tuple[Scheme, keepstep.Job]:
        before = shm_bytes()
        job = keepstep.protect(
            {
                "job": f"bench-{os.getpid()}",
                "state_dir": str(self.directory / "state"),
                "grace_s": 5.0,
                "scrub_every_s": 0.0,
            },
            model=self.model,
            optimizer=self.optimizer,
        )
        steps: Iterator[int] = job.steps(1 << 60)
        next(steps)  # the boundary of step s is the moment step s + 1 is asked for

        def save(_: int) -> None:
            page = job._rank._page.read()  # by now it tells of the copy that the step before began
            if page is not None and page.copy_ns_last:
                self.copies.append(page.payload_bytes / page.copy_ns_last * 1e9)
                self.seals.append(page.payload_bytes / page.seal_ns_last * 1e9)
            next(steps)

        scheme = Scheme("keepstep", save, lambda: job._drain(job._rank.drain, 60.0) and None)
        scheme.memory_ratio = (shm_bytes() - before) / self.state_bytes
        return scheme, job

    def torch_save(self) -> Scheme:
        return Scheme(
            "torch.save", lambda step: torch.save(self.state(), self.directory / "state.pt")
        )

    def dcp_async(self) -> Scheme:
        pending: list[Any] = []

        def wait() -> None:
            while pending:
                pending.pop().result()

        def save(step: int) -> None:
            wait()
            pending.append(
                dcp.async_save(self.state(), checkpoint_id=str(self.directory / f"dcp-{step % 2}"))
            )

        return Scheme("dcp.async_save", save, wait)

    def torchsnapshot(self) -> Scheme:
        import torchsnapshot

        pending: list[Any] = []

        def wait() -> None:
            while pending:
                pending.pop().wait()

        def save(step: int) -> None:
            wait()
            path = str(self.directory / f"snapshot-{step % 2}")
            pending.append(
                torchsnapshot.Snapshot.async_take(
                    path, {"model": self.model, "optimizer": self.optimizer}
                )
            )

        return Scheme("torchsnapshot", save, wait)

    def peers(self) -> list[Scheme]:
        wanted = self.args.peers.split(",")
        schemes = []
        if "torch.save" in wanted:
            schemes.append(self.torch_save())
        if "dcp" in wanted:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            schemes.append(self.dcp_async())
        if "torchsnapshot" in wanted and importlib.util.find_spec("torchsnapshot"):
            asyncio.set_event_loop(asyncio.new_event_loop())
            schemes.append(self.torchsnapshot())
        return schemes

    # -- measuring

    def block(self, scheme: Scheme, first: int) -> None:
        times = []
        for step in range(first, first + self.args.steps):
            began = time.perf_counter()
            self.train_one()
            trained = time.perf_counter()
            scheme.save(step)
            saved = time.perf_counter()
            times.append(saved - began)
            scheme.stall_s.append(saved - trained)
        scheme.step_s += times
        scheme.rounds.append(statistics.median(times))
        began = time.perf_counter()
        self.train_one()  # saves nothing, but pays what the last save left behind
        scheme.hidden_s.append(time.perf_counter() - began)
        scheme.drain()

    def run(self) -> dict[str, Any]:
        for _ in range(3):
            self.train_one()
        yardstick = Memcpy(self.state_bytes)
        nothing = Scheme("nothing", lambda _: None)
        ours, job = self.keepstep()
        schemes = [nothing, ours, *self.peers()]
        for scheme in schemes:  # the first save apart: peers allocate there
            began = time.perf_counter()
            scheme.save(0)
            scheme.first_s = time.perf_counter() - began
            scheme.drain()
        memcpys: list[float] = []
        by_name = {scheme.name: scheme for scheme in schemes}
        for round_, order in enumerate(harness.turns(list(by_name), self.args.rounds)):
            for scheme in map(by_name.__getitem__, order):
                gc.collect()
                self.block(scheme, 1 + round_ * self.args.steps)
                memcpys += [yardstick.bytes_per_s() for _ in range(2)]
                print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        page = job._rank._page.read()
        assert page is not None
        report = self.report(schemes, nothing)
        memcpy, copied, sealed = (
            statistics.median(values) for values in (memcpys, self.copies, self.seals)
        )
        report["keepstep"] = {
            "memcpy_gbps": memcpy / 1e9,
            "copy_gbps": copied / 1e9,
            "copy_ratio_of_memcpy": copied / memcpy,
            "seal_gbps": sealed / 1e9,
            "captured_steps": page.captured_steps,
            "skipped_steps": page.skipped_steps,
            "slots": len(page.slots),
            "memory_ratio_formula": len(page.slots) * 1.0,
        }
        job.close(ok=True)
        return report

    def report(self, schemes: list[Scheme], nothing: Scheme) -> dict[str, Any]:
        base = statistics.median(nothing.step_s)
        rows = []
        for s in schemes:
            ratios = [a / b for a, b in zip(s.rounds, nothing.rounds, strict=True)]
            rows.append(
                {
                    "scheme": s.name,
                    "step_ms": statistics.median(s.step_s) * 1e3,
                    "slowdown_ratio": statistics.median(ratios) - 1,
                    "call_ms": statistics.median(s.stall_s) * 1e3,
                    "first_save_ms": s.first_s * 1e3,
                    "hidden_ms": (statistics.median(s.hidden_s) - base) * 1e3,
                    "memory_ratio": s.memory_ratio,
                }
            )
        return {
            "state_mib": self.state_bytes / (1 << 20),
            "step_ms": base * 1e3,
            "rounds": self.args.rounds,
            "schemes": rows,
        }


def show(report: dict[str, Any]) -> None:
    print(
        f"state {report['state_mib']:.0f} MiB, step {report['step_ms']:.0f} ms without "
        f"saving, {report['rounds']} rounds"
    )
    print(
        f"{'scheme':16}{'step ms':>10}{'slowdown':>10}{'call ms':>10}"
        f"{'first ms':>10}{'hidden ms':>11}{'memory':>8}"
    )
    for r in report["schemes"]:
        ratio = "" if r["memory_ratio"] is None else f"{r['memory_ratio']:.1f}x"
        print(
            f"{r['scheme']:16}{r['step_ms']:10.1f}{r['slowdown_ratio']:10.1%}"
            f"{r['call_ms']:10.2f}{r['first_save_ms']:10.1f}"
            f"{r['hidden_ms']:11.1f}{ratio:>8}"
        )
    k = report["keepstep"]
    print(
        f"keepstep copies at {k['copy_gbps']:.1f} GB/s, {k['copy_ratio_of_memcpy']:.0%} of a "
        f"memcpy ({k['memcpy_gbps']:.1f} GB/s); "
        f"checksums at {k['seal_gbps']:.1f} GB/s; {k['captured_steps']} steps captured, "
        f"{k['skipped_steps']} skipped, {k['slots']} slots"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["blocks", "demo"], default="blocks")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--batch", type=int, default=224)
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--peers", default="torch.save,dcp,torchsnapshot", help="comma separated, or none"
    )
    parser.add_argument(
        "--directory", default=None, help="where peers write (default: the temporary directory)"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.sched_setaffinity(0, harness.cores(2))
    watch = harness.watch()
    bench = Bench(args)
    try:
        report = bench.run()
        noise = watch.end()
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(bench.directory)
    harness.tell(noise, report, args.json, show)


if __name__ == "__main__":
    main()
