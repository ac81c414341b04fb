"""Finite: whether tensors hold NaN or infinity, the quick way.

The sum of the squares of a tensor's values is not finite when one of them is not, and costs a
twentieth of asking each value. It also overflows where all values are finite and huge; so one that
is not finite is confirmed value by value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from keepstep.edge.torch.dtensors import is_dtensor

HALVES = (torch.float16, torch.bfloat16)
PACKED = getattr(torch, "float4_e2m1fn_x2", None)  # has neither NaN nor infinity


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether it has fewer bits than most computing is done in."""
    return dtype in HALVES or _is_float8(dtype)


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1 and dtype is not PACKED


def countable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a type that torch can ask: of float8 it knows how to cast it, and little
    more."""
    return tensor.float() if _is_float8(tensor.dtype) else tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Its values on this rank, as one dense tensor."""
    local = tensor.detach()
    if is_dtensor(tensor):
        local = tensor.to_local().detach()
    return local._values() if local.is_sparse else local


def square_of(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of its values, as quickly as they can be read; nothing is waited
    for. A half's square has no place in so few bits: it is summed as float32."""
    with torch.no_grad():
        is_plain = tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous()
        if is_plain and tensor.device.type == "cpu":  # cuBLAS takes no more than 2^31 values
            values = tensor.view(-1)
            return torch.dot(values, values)
        tensor = countable(tensor)
        wider = torch.float32 if tensor.dtype in HALVES else None
        return torch.linalg.vector_norm(tensor, dtype=wider).square()


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """The norm of all of them together; NaN or infinity when one value is. For a device it is
    waited for."""
    total = _root([square_of(t) for t in tensors])
    if math.isfinite(total) or not_finite(tensors):
        return total
    # Every value is finite, and the sum of their squares was not.
    return math.hypot(*(float(torch.linalg.vector_norm(t.double())) for t in tensors))


def _root(squares: Sequence[torch.Tensor]) -> float:
    if not squares:
        return 0.0
    if len({(square.device, square.dtype) for square in squares}) == 1:
        total = float(torch.stack(list(squares)).sum(dtype=torch.float64))
    else:
        total = sum(float(square) for square in squares)
    return math.sqrt(total) if total >= 0 else math.nan


def not_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one value is not finite, asked of each."""
    return any(not bool(torch.isfinite(countable(t)).all()) for t in tensors if can_be_bad(t))


def can_be_bad(tensor: torch.Tensor) -> bool:
    """Whether it is of a type that has NaN."""
    return (tensor.is_floating_point() and tensor.dtype is not PACKED) or tensor.is_complex()


Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def bad_names(named: Named) -> list[str]:
    """The names of those that hold what is not finite, in their order."""
    return list(bad_kinds(named))


def bad_kinds(named: Named) -> dict[str, bool]:
    """The same, and of each whether it holds NaN; else infinity alone."""
    pairs = list(named.items() if isinstance(named, Mapping) else named)
    local = [(name, plain(t)) for name, t in pairs if can_be_bad(t) and t.numel()]
    squares = [square_of(t) for _, t in local]
    return {
        name: bool(torch.isnan(countable(t)).any())
        for (name, t), square in zip(local, squares, strict=True)
        if not math.isfinite(float(square)) and not_finite([t])
    }


class KnownKinds:
    """What was not finite once and is meant to be: infinity is no news where there was one, and
    NaN where there was one."""

    def __init__(self, kinds: Mapping[str, bool] | None = None) -> None:
        self._kinds = dict(kinds or {})

    def news(self, kinds: Mapping[str, bool]) -> dict[str, bool]:
        """Those that are."""
        known = self._kinds
        return {n: has_nan for n, has_nan in kinds.items() if has_nan > known.get(n, -1)}


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch, wherever they are in its dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from tensors_in(inner, f"{path}[{index}]")
