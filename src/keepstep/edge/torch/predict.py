"""Predict: how much state an optimizer will have once it has stepped.

The first step of most optimizers creates the bulk of what there is to protect. Knowing it
beforehand lets the slots be made, pre-faulted and checked against free memory before training
starts, not in the first step. The optimizer's own code tells: one step of a copy of it on the meta
device, where tensors have shapes and no bytes. A wrong or missing prediction costs a slot growing
later, nothing else.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch

from keepstep.edge.torch.parts import parameters_of
from keepstep.edge.torch.tree import local_part


def coming_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Bytes of state this rank's part of the optimizer will add; 0 when it already has state, None
    when it cannot be told."""
    if optimizer.state:
        return 0
    try:
        double = copy.copy(optimizer)
        double.state = defaultdict(dict)
        double.param_groups = [_on_meta(group) for group in optimizer.param_groups]
        double.step()
    except (
        RuntimeError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        NotImplementedError,
        AssertionError,
    ):
        return None  # an optimizer of another make: it says so itself after its first step
    tensors = [
        v
        for p in parameters_of(double)
        for v in double.state[p].values()
        if isinstance(v, torch.Tensor)
    ]
    return sum(t.numel() * t.element_size() for t in tensors)


def _on_meta(group: dict[str, Any]) -> dict[str, Any]:
    parameters = []
    for parameter in group["params"]:
        local = local_part(parameter)
        fake = torch.empty_like(local, device="meta").requires_grad_(
            parameter.requires_grad and local.is_floating_point()
        )
        if fake.requires_grad:
            fake.grad = torch.empty_like(fake)
        parameters.append(fake)
    plain = {"fused": False, "foreach": False, "capturable": False}
    return {**group, "params": parameters, **{k: v for k, v in plain.items() if k in group}}
