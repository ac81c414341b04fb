"""The demo's training as a rank takes its steps, and the switches that take a part of keepstep out
of them and put it back between two steps.

In comes what `keepstep run` tells a rank; out come steps to time. A switch is set on all ranks
before the same step. It changes no state that is trained on, so that the steps with and without are
steps of one training.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import keepstep
from keepstep.edge.torch.membership import membership

REPOSITORY = Path(__file__).parents[1]


class Switch(Protocol):
    """A part of keepstep."""

    def set(self, is_on: bool) -> None: ...


class SlowRanksSwitch:
    """`slow_ranks`, of a job that has begun its first step with it."""

    def __init__(self, job: Any) -> None:
        self._measure = job._measure
        self._clock, self._busy = self._measure._clock, membership.on_busy
        assert self._clock is not None, "it is on by default"

    def set(self, is_on: bool) -> None:
        self._measure._clock = self._clock if is_on else None
        membership.on_busy = self._busy if is_on else (lambda is_busy: None)


class WrongNumbersSwitch:
    """`wrong_numbers`, of a job that began with it."""

    def __init__(self, job: Any) -> None:
        self._numbers, self._protected = job._numbers, job._world.live._protected
        assert self._numbers._doubt is not None, "it is on by default"
        self._looks = self._numbers._guard, self._numbers._doubt, self._protected.known_bad

    def set(self, is_on: bool) -> None:
        guard, doubt, known = self._looks if is_on else (None, None, None)
        self._numbers._guard, self._numbers._doubt = guard, doubt
        self._protected.known_bad = known


class ProberSwitch:
    """`sick_parts`: its process stands still while it is off. What was due meanwhile it does
    afterwards, so all it costs falls into the other half, where it counts at most twice. One that
    is to stay off may say in between that it lives: after 15 s of silence it is started anew."""

    BREATH_S = 0.05

    def __init__(self, pid: int) -> None:
        self._pid, self._is_on = pid, True

    def set(self, is_on: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not self._is_on:
                os.kill(self._pid, signal.SIGCONT)
                time.sleep(0 if is_on else self.BREATH_S)
            if not is_on:
                os.kill(self._pid, signal.SIGSTOP)
        self._is_on = is_on


def all_at_once(switches: Iterable[Switch]) -> Callable[[bool], None]:
    """Sets all of them."""
    each = list(switches)

    def set_all(is_on: bool) -> None:
        for switch in each:
            switch.set(is_on)

    return set_all


class DemoSteps:
    """One rank of `examples/gpt.py`. `job` is there once `begin` was called."""

    job: Any

    def __init__(self) -> None:
        spec = importlib.util.spec_from_file_location("gpt", REPOSITORY / "examples" / "gpt.py")
        assert spec is not None and spec.loader is not None
        self._gpt = gpt = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(gpt)
        self._args = args = gpt.arguments([])
        torch.set_num_threads(1)
        torch.manual_seed(args.seed)
        keepstep.init_process_group()
        self._windows = gpt.read_text().unfold(0, args.context + 1, args.context)
        self._model = nn.parallel.DistributedDataParallel(
            gpt.GPT(args.width, args.layers, args.heads, args.context)
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=args.lr, betas=(0.9, 0.95))
        self._scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, 10**6)
        self._sampler = gpt.PositionSampler(len(self._windows), args.seed)

    def begin(self, total_steps: int) -> Iterator[Any]:
        """Protected from now on: each step, begun. Its body is `train`."""
        self.job = keepstep.protect(
            model=self._model,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            sampler=self._sampler,
        )
        return iter(self.job.steps(total_steps))

    def train(self, step: Any) -> None:
        """The body of that step."""
        with step:
            self.job.report(loss=self.compute())

    def compute(self) -> float:
        """What a step trains; the loss."""
        batch = self._windows[self._sampler.take(self._args.batch)].long()
        return float(self._gpt.train_one(self._model, self._optimizer, self._scheduler, batch))
