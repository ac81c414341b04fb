"""Plain numbers: whether those are finite that updates are made with and that are no tensors.

A learning rate that is not finite leaves parameters and optimizer state as they are, until the next
update has spoilt all of them: a snapshot of before it would be sealed, and whoever resumed from it
would come to the same again.

Comes in: parts by their paths. Goes out: by name, of each number that is not finite, whether it is
NaN. Of an optimizer any is told, of a schedule NaN alone (the best loss so far begins with
infinity), of a loss scaler its scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

UPDATED_BY = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
NOT_NUMBERS = {"params", "optimizer"}  # are looked at as parameters, and as a part


def bad_numbers(parts: Mapping[str, Any]) -> dict[str, bool]:
    """Of all of them. Waits for no device."""
    found: dict[str, bool] = {}
    for path, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            found.update(_bad(f"{path}.param_groups", part.param_groups))
        elif isinstance(part, LRScheduler):
            found.update((name, True) for name, is_nan in _bad(path, part) if is_nan)
        elif isinstance(part, torch.amp.GradScaler) and part.is_enabled():
            found.update(_bad(f"{path}.scale", part._scale))
    return found


def _bad(name: str, value: Any) -> Iterator[tuple[str, bool]]:
    """Of a number, or of those that are in lists and dicts."""
    kind = type(value)
    if kind is float:
        if not math.isfinite(value):
            yield name, math.isnan(value)
    elif kind is dict:
        for key, inner in value.items():
            if key not in NOT_NUMBERS:
                yield from _bad(f"{name}.{key}", inner)
    elif kind is list or kind is tuple:
        for index, inner in enumerate(value):
            yield from _bad(f"{name}.{index}", inner)
    elif isinstance(value, LRScheduler):  # one may consist of others
        yield from _bad(name, vars(value))
    elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        yield from _bad(name, float(value))
