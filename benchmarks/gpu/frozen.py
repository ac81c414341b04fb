"""What it saves that a frozen base (LoRA's) is digested on its device in place of being copied.

Started by `lab.py`. One training: nothing saved, then each step with the base copied again, as
before, then each step with it compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.gpu.workload import GB, SETTLED, device_times, mark, say
from keepstep.edge.torch import tree
from keepstep.edge.torch.live_state import TorchState

WIDTH = 4096  # 32 MiB a layer
RANK = 16
TOKENS = 8192
STEPS = 14  # of each


class Adapted(torch.nn.Module):
    """A linear layer that does not learn, and two small ones beside it that do."""

    def __init__(self, on: str) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16, device=on)
        self.base.requires_grad_(False)
        self.down = torch.nn.Linear(WIDTH, RANK, bias=False, device=on)
        self.up = torch.nn.Linear(RANK, WIDTH, bias=False, device=on)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        return y + self.up(self.down(x))


class Adapters:
    """The training."""

    def __init__(self, gb: float, on: str) -> None:
        count = max(1, round(gb * GB / 2 / WIDTH / WIDTH))
        self.model = torch.nn.Sequential(*[Adapted(on) for _ in range(count)])
        learning = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(learning, lr=1e-5)
        self._x = torch.randn(TOKENS, WIDTH, device=on, dtype=torch.bfloat16)
        self._on = on

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self._on, torch.bfloat16):
            y = self.model(self._x).float().square().mean()
        y.backward()
        self.optimizer.step()


def frozen(gb: str = "2", on: str = "cuda") -> None:
    """Stall, device-to-host bytes and step, median of a mode's later steps. `host_ms`: what the
    trainer's thread was in keepstep at a boundary."""
    import keepstep

    training = Adapters(float(gb), on)
    say_times("none", run_plain(training))
    copies = watch_copies()
    job = keepstep.protect(model=training.model, optimizer=training.optimizer)
    steps = iter(job.steps(2 * STEPS + 2))
    digesting = tree.DIGESTING
    for mode in ("copied", "compared"):
        tree.DIGESTING = frozenset() if mode == "copied" else digesting
        job._protected.forget_plan()
        copies.clear()
        marks, hosts = [], []
        for _ in range(STEPS):
            began = time.perf_counter()
            next(steps)
            hosts.append(time.perf_counter() - began)
            training.step()
            marks.append(mark())
        torch.cuda.synchronize()
        say_mode(mode, copies[SETTLED:], marks, hosts[SETTLED:])
    list(steps)
    page = job._rank._page.read()
    say("frozen_job", captured=page.captured_steps, skipped=page.skipped_steps)
    job.close()


def run_plain(training: Adapters) -> list[Any]:
    marks = []
    for _ in range(STEPS):
        training.step()
        marks.append(mark())
    torch.cuda.synchronize()
    return marks


def watch_copies() -> list[Any]:
    make, found = TorchState.copy, []

    def copy(self: TorchState, *given: Any) -> Any:
        found.append(make(self, *given))
        return found[-1]

    TorchState.copy = copy  # type: ignore[method-assign]
    return found


def say_times(mode: str, marks: list[Any]) -> None:
    say("frozen", mode=mode, step_ms=statistics.median(device_times(marks)))


def say_mode(mode: str, copies: list[Any], marks: list[Any], hosts: Iterable[float]) -> None:
    waited = [ns for copy in copies if (ns := copy.waited_ns()) is not None]
    say(
        "frozen",
        mode=mode,
        step_ms=statistics.median(device_times(marks)),
        stall_ms=statistics.median(waited) / 1e6 if waited else -1.0,
        d2h_gb=statistics.median(copy.device_bytes for copy in copies) / GB if copies else -1.0,
        host_ms=statistics.median(hosts) * 1e3,
        snapshots=len(copies),
        torn=sum(bool(copy.moved) for copy in copies),
    )
