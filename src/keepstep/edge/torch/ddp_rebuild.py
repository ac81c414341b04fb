"""DDP rebuild: what the objects of a training hold besides their state is made as in a process that
has just begun.

A rank that stays in its process meets one that has just started. DDP would add gradients in buckets
that the newcomer does not know yet, and a backward pass that was given up may have left it waiting
for gradients. Gradients themselves are of the restored state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from keepstep.edge.torch.leftovers import drop_leftovers, watch_for_leftovers
from keepstep.edge.torch.pipelines import renew_pipelines, watch_pipelines


def prepare_to_renew() -> None:
    """Some of what `renew` changes is looked for in all of the process: now, while nobody waits."""
    watch_pipelines()
    watch_for_leftovers()


def renew(objects: Iterable[Any]) -> None:
    """Before the first step after a regroup, on every rank that stayed. Raises RuntimeError when
    that cannot be done in this process."""
    renew_pipelines()
    drop_leftovers()
    for thing in objects:
        if isinstance(thing, torch.nn.Module):
            for module in thing.modules():
                if isinstance(module, DistributedDataParallel):
                    _renew_ddp(module)


def _renew_ddp(ddp: DistributedDataParallel) -> None:
    """A new reducer, as unpickling makes one; the old one takes its hooks with it."""
    with _learning_as_at_construction(ddp):
        parameters, expect_sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in ddp._comm_hooks:
        dist._register_comm_hook(ddp.reducer, state, hook)


@contextmanager
def _learning_as_at_construction(ddp: DistributedDataParallel) -> Iterator[None]:
    """A reducer takes what requires a gradient. In a newcomer that is what did so when the model
    was wrapped, whatever was frozen since."""
    buckets = ddp.reducer._get_zeros_like_grad_buckets()  # zeros, but of the reducer's parameters
    learning = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    del buckets
    today = [(parameter, parameter.requires_grad) for parameter in ddp.module.parameters()]
    try:
        for parameter, _ in today:
            parameter.requires_grad_(id(parameter) in learning)
        yield
    finally:
        for parameter, requires_grad in today:
            parameter.requires_grad_(requires_grad)
