"""Number faults: the hand inside a rank that makes a number of its training wrong.

Comes in: the plan's faults, and the model, optimizer and batches of the drill's job. Goes out: one
bit turned, one number not finite, or a tensor many times too large; and a note of it that outlives
the rank. Where it happens is where hardware does it: the local gradient before it is reduced, the
reduced one on this rank alone, a weight or a moment after the update, an activation on its way, the
batch. No version counter moves with it: memory does not tell either.

Invariant: what is chosen follows from the drill's seed and the fault's number alone; a fault that
is to happen once happens in one life.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from keepstep.model.snapshot import Phase
from keepstep.testing.faults import BITFLIP, NAN, Fault
from keepstep.testing.injector import FaultPlan, note
from keepstep.testing.lines import Lines

Named = tuple[str, torch.Tensor]


class NumberFaults:
    """A phase listener: it hears which step begins, and the hooks that `attach` sets do the rest.
    Does nothing in a job without such faults."""

    def __init__(self, plan: FaultPlan | None = None, rank: int = 0) -> None:
        faults = () if plan is None else plan.faults
        self._mine = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.is_number and fault.rank == rank
        }
        self._done: dict[int, int] = {}
        if plan is not None:
            self._plan = plan
            said = [line for line in Lines(plan.attempts).new() if line["what"] == "did"]
            self._done = {n: sum(line["fault"] == n for line in said) for n in self._mine}
        self._step = -1
        self._due: dict[int, Fault] = {}

    def __call__(self, phase: Phase, step: int) -> None:
        if phase is not Phase.STEP:
            return
        self._step = step
        self._due = {
            number: fault
            for number, fault in self._mine.items()
            if step >= fault.step and (not fault.times or self._done[number] < fault.times)
        }

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """`model`: as it is trained, in its wrapper."""
        if not self._mine:
            return
        sites = {fault.site for fault in self._mine.values()}
        learning = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if "grad" in sites:
            for name, parameter in learning:
                parameter.register_hook(self._gradient_hook(name, [n for n, _ in learning]))
        if "activation" in sites:
            leaves = [(n, m) for n, m in model.named_modules() if not list(m.children())]
            for name, module in leaves:
                module.register_forward_hook(self._output_hook(name, [n for n, _ in leaves]))
        if "reduced" in sites:
            optimizer.register_step_pre_hook(lambda *_: self._strike("reduced", _grads(learning)))
        if sites & {"weight", "optimizer"}:
            optimizer.register_step_post_hook(lambda *_: self._updated(learning, optimizer))

    def batch(self, batch: torch.Tensor) -> torch.Tensor:
        """What the step computes with."""
        if any(fault.site == "batch" for fault in self._due.values()):
            batch = batch.clone()
            self._strike("batch", [("batch", batch)])
        return batch

    def _updated(self, learning: Sequence[Named], optimizer: torch.optim.Optimizer) -> None:
        self._strike("weight", learning)
        states = [
            (f"{name}.{key}", value)
            for name, parameter in learning
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim()
        ]
        self._strike("optimizer", states)

    def _gradient_hook(
        self, name: str, names: Sequence[str]
    ) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            return self._copy_struck("grad", name, names, gradient)

        return hook

    def _output_hook(
        self, name: str, names: Sequence[str]
    ) -> Callable[[nn.Module, Any, Any], torch.Tensor | None]:
        def hook(module: nn.Module, given: Any, output: Any) -> torch.Tensor | None:
            if not isinstance(output, torch.Tensor):
                return None
            changed = self._copy_struck("activation", name, names, output.detach())
            return None if changed is None else _Struck.apply(output, changed)

        return hook

    def _copy_struck(
        self, site: str, name: str, names: Sequence[str], tensor: torch.Tensor
    ) -> torch.Tensor | None:
        """A copy with the fault in it, where this tensor is the one that is drawn."""
        struck = None
        for number, fault in list(self._due.items()):
            if fault.site == site and self._rng(number).choice(list(names)) == name:
                if struck is None:
                    struck = tensor.clone(memory_format=torch.contiguous_format)
                self._do(number, fault, name, struck)
        return struck

    def _strike(self, site: str, tensors: Sequence[Named]) -> None:
        for number, fault in list(self._due.items()):
            if fault.site == site and tensors:
                name, tensor = self._rng(number).choice(list(tensors))
                self._do(number, fault, name, tensor.detach())

    def _rng(self, number: int) -> random.Random:
        return random.Random(f"{self._plan.seed}/{number}")

    def _do(self, number: int, fault: Fault, name: str, tensor: torch.Tensor) -> None:
        del self._due[number]
        self._done[number] += 1
        told = {"step": self._step, "phase": fault.phase, "pid": os.getpid()}
        note(self._plan.attempts, number, "about to", **told)
        try:
            what = make_wrong(tensor, fault, random.Random(f"{self._plan.seed}/{number}/place"))
        except ValueError as error:
            note(self._plan.attempts, number, "cannot", why=f"{name}: {error}")
            return
        note(self._plan.attempts, number, "did", tensor=name, wrong=what, **told)


def make_wrong(tensor: torch.Tensor, fault: Fault, rng: random.Random) -> str:
    """Do it to that tensor, in place; what was done, in words. Raises ValueError where the tensor
    is not of 4-byte numbers in one piece of memory, and a bit is to be turned."""
    if fault.factor is not None:
        scaled = tensor * fault.factor
        _write(tensor, scaled.contiguous())
        return f"all of it {fault.factor:g} times as large"
    place = rng.randrange(tensor.numel())
    if fault.kind == NAN:
        broken = tensor.clone().contiguous()
        broken.view(-1)[place] = math.nan
        _write(tensor, broken)
        return f"element {place} is not a number"
    assert fault.kind == BITFLIP
    bit = rng.randrange(32) if fault.bit is None else fault.bit
    before, after = flip(tensor, place, bit)
    return f"bit {bit} of element {place}: {before!r} became {after!r}"


def flip(tensor: torch.Tensor, place: int, bit: int) -> tuple[float, float]:
    """Turn that bit of the tensor's memory; the element before and after. Raises ValueError as
    `make_wrong`."""
    if tensor.element_size() != 4 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"expected 4-byte numbers in one piece on the CPU, found {tensor.dtype} of strides "
            f"{tensor.stride()} on {tensor.device}"
        )
    before = float(tensor.view(-1)[place])
    address = tensor.data_ptr() + 4 * place
    word = ctypes.c_uint32.from_address(address)
    word.value ^= 1 << bit
    return before, float(tensor.view(-1)[place])


def _write(tensor: torch.Tensor, bytes_of: torch.Tensor) -> None:
    """As memory that fails: no counter of torch's tells."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"expected a tensor in one piece on the CPU, found strides {tensor.stride()} on "
            f"{tensor.device}"
        )
    ctypes.memmove(tensor.data_ptr(), bytes_of.data_ptr(), tensor.nbytes)


def _grads(learning: Sequence[Named]) -> list[Named]:
    return [(name, p.grad) for name, p in learning if p.grad is not None]


class _Struck(torch.autograd.Function):
    """The output that came out wrong, in the place of the right one: what follows computes with it,
    and the gradient flows as if it had been right."""

    @staticmethod
    def forward(context: Any, output: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        return changed

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
