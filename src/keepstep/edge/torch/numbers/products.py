"""Products: checksums of the matrix products in linear layers.

Comes in: modules by their names. Goes out: the layers whose product does not fit its checksum, in
one body. A product C = A B has the sums of its rows twice over, C 1 = A (B 1), and the second way
costs a vector in place of a matrix (algorithm-based fault tolerance: Huang and Abraham, 1984). An
element that was computed wrong, or flipped before the sum is taken, shows where it is off by more
than the products' own rounding: to less than that this is blind.

    forward    y = x W^T + b     sums of y over outputs          x (W^T 1) + b 1
    backward   dW = dy^T x       sums of dW over outputs         (dy 1)^T x

Not looked at: dy W, the gradient that goes on to the layer before; no hook sees it alone.

Invariant: only looks: what is computed is bit for bit what it is without.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from keepstep.edge.torch.parts import bare
from keepstep.model.numbers import Origin

# How far the two sums may be apart: so many units of rounding of the sum of all magnitudes that
# went into them. `benchmarks/products.py` fits it.
ROUNDINGS = 8.0
UNDERFLOW = 2.0**20  # so many products that are too small to have all their bits

Sums = tuple[torch.Tensor, torch.Tensor]  # of values, and of their magnitudes


class Products:
    """Of one body, from when this is made until `end`."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.wrong: list[Origin] = []
        self._handles: list[Any] = []
        self._expected: dict[str, Sums] = {}  # of a weight's gradient, from all uses of the layer
        for path, root in modules.items():
            for name, module in bare(root).named_modules():
                if type(module) is nn.Linear and module.weight.dtype.is_floating_point:
                    self._watch(f"{path}.{name}" if name else path, module)

    def _watch(self, name: str, module: nn.Linear) -> None:
        self._handles.append(module.register_forward_hook(partial(self._forward, name)))
        if module.weight.requires_grad:
            hook = module.weight.register_hook(partial(self._gradient, name))
            self._handles.append(hook)

    def end(self) -> None:
        """No more looks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._expected.clear()

    def _forward(self, name: str, module: nn.Linear, args: Any, y: torch.Tensor) -> None:
        with torch.no_grad():
            rows = _rows(args[0])
            weight, bias = module.weight.detach().double(), module.bias
            value = rows.double() @ weight.sum(0)
            size = rows.double().abs() @ weight.abs().sum(0)
            if bias is not None:
                value += bias.detach().double().sum()
                size += bias.detach().double().abs().sum()
            if are_apart((value, size), _rows(y).double().sum(1), y.dtype):
                self.wrong.append(Origin(name, "Linear, by its checksum", "forward"))
        if y.requires_grad:
            y.register_hook(partial(self._arrives, name, rows))

    def _arrives(self, name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """At the layer's output, before it makes its weight's gradient."""
        with torch.no_grad():
            dy, x = _rows(gradient).double(), rows.double()
            value, size = dy.sum(1) @ x, dy.abs().sum(1) @ x.abs()
            before = self._expected.get(name)
            if before is not None:
                value, size = value + before[0], size + before[1]
            self._expected[name] = value, size

    def _gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Of the weight, from all uses since its last one."""
        expected = self._expected.pop(name, None)
        if expected is None:
            return
        with torch.no_grad():
            if are_apart(expected, gradient.double().sum(0), gradient.dtype):
                self.wrong.append(Origin(name, "Linear, by its checksum", "backward"))


def are_apart(expected: Sums, found: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether one of the sums is further off than rounding to `dtype` explains. Nothing is said of
    what is not finite: others look for that."""
    value, size = expected
    kind = torch.finfo(dtype)
    apart = (found - value).abs() > ROUNDINGS * kind.eps * size + UNDERFLOW * kind.tiny
    return bool((apart & torch.isfinite(found) & torch.isfinite(value)).any())


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])
