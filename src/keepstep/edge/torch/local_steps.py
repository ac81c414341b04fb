"""Local steps: gradients that stay where they are, and now and then one mean of the parameters.

Comes in: a step's body, and whether it ends such a period. Goes out: the same parameters on all
ranks, where it does (local SGD; Stich, ICLR 2019; Lin et al., ICLR 2020). What else an optimizer
has, moments say, each rank keeps for itself, and buffers too.

Moves numbers, decides nothing. Invariant: parameters change only when all ranks' have been summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def without_reduction(models: Sequence[Any]) -> Iterator[None]:
    """Backward passes reduce nothing, and forward passes bring no buffers."""
    with ExitStack() as around:
        for model in models:
            around.enter_context(model.no_sync())
            # DistributedDataParallel's own; a process that has just begun would wait for buffers
            # from those who have long been past their first pass.
            model.require_forward_param_sync = False
        yield


def average(
    parameters: Sequence[torch.Tensor], ranks: int, check_peers: Callable[[], object]
) -> None:
    """Over all ranks. check_peers: raises where what came from them is worthless."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    with torch.no_grad():
        for alike in kinds.values():
            flat = torch.cat([p.reshape(-1) for p in alike])
            dist.all_reduce(flat)
            check_peers()
            flat.div_(ranks)
            for parameter, part in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
                parameter.copy_(part.view_as(parameter))
