"""Looks: whether many tensors still are what they were, in a fraction of a microsecond each.

What a tensor is: where its bytes lie, its class, type, device, sizes and strides, whether it learns
and whether it is a leaf. What its bytes say is no part of it.

torch's own compiler asks the same of the tensors it has compiled for, in one call (`TensorGuards`).
It is no public name: where a torch lacks it the same is asked of each tensor in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch

# So that `map` calls them without a frame of Python's.
POINTER: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
VERSION: Callable[[torch.Tensor], int] = attrgetter("_version")
GRADIENT: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")
IS_LEAF: Callable[[torch.Tensor], bool] = attrgetter("is_leaf")

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


class Looks:
    """Of these tensors, none of them twice, as they are now. They are not held. `versions`: their
    counters at the last look, asked while the tensors are in the cache."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._same_kind = _by_guards(tensors) or _one_by_one(tensors)
        self._pointers = list(map(POINTER, tensors))
        self.versions = list(map(VERSION, tensors))
        # The others are leaves as long as they do not learn.
        self._learns = [tensor.requires_grad for tensor in tensors]
        self._are_leaves = self._leaves_of(tensors)

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the same tensors, in the same order, are as they were. Asked where gradients are
        enabled: elsewhere guards see nothing that learns, and the answer is no."""
        same = (
            list(map(POINTER, tensors)) == self._pointers
            and self._same_kind(tensors)
            and (not self._are_leaves or self._leaves_of(tensors) == self._are_leaves)
        )
        self.versions = list(map(VERSION, tensors))
        return same

    def _leaves_of(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        return list(map(IS_LEAF, compress(tensors, self._learns)))


def _by_guards(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool] | None:
    """None where this torch has no guards as they are known here."""
    kind = getattr(_guards, "TensorGuards", None)
    if kind is None or not tensors:
        return None
    try:
        with torch.enable_grad():  # else they see nothing that learns
            guards = kind(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except TypeError:
        return None

    def same(now: Sequence[torch.Tensor]) -> bool:
        return bool(guards.check(*now))

    with torch.enable_grad():
        return same if same(tensors) else None


def _one_by_one(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    before = list(map(_kind, tensors))
    return lambda now: list(map(_kind, now)) == before


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )
