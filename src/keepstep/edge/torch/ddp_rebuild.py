"""DDP rebuild: what the objects of a training hold besides their state is made as in a process that
has just begun.

A rank that stays in its process meets one that has just started. DDP would add gradients in buckets
that the newcomer does not know yet, and a backward pass that was given up may have left it waiting
for gradients. Gradients themselves are of the restored state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from keepstep.edge.torch.ddp_buckets import renew_reducer, wrapping
from keepstep.edge.torch.instances import watch
from keepstep.edge.torch.leftovers import drop_leftovers, watch_for_leftovers
from keepstep.edge.torch.pipelines import renew_pipelines, watch_pipelines


def prepare_to_renew() -> None:
    """Some of what `renew` changes is looked for in all of the process: now, while nobody waits."""
    watch_pipelines()
    watch_for_leftovers()
    watch(DistributedDataParallel)


def renew(objects: Iterable[Any]) -> None:
    """Before the first step after a regroup, on every rank that stayed. Raises RuntimeError when
    that cannot be done in this process."""
    renew_pipelines()
    drop_leftovers()
    for _, ddp in wrapping({str(number): thing for number, thing in enumerate(objects)}):
        renew_reducer(ddp)
