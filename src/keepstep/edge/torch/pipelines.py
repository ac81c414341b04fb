"""Pipelines: what `torch.distributed.pipelining` has agreed on with its peers is forgotten.

A schedule's first step connects its stages and tells them the shapes of what they will receive. A
process that has just begun does that with its first step; one that stays in its process would not
do it again, and both would wait for each other. The objects are the program's, and not among what
is protected: they are looked for.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from keepstep.edge.torch.instances import instances, watch

# What says that a schedule's stages have met, in the releases of torch since 2.6.
FLAGS = (
    "_stage_initialized",
    "_stages_initialized",
    "_stage_forward_initialized",
    "_stage_backward_initialized",
    "_stages_forward_initialized",
    "_stages_backward_initialized",
)


def watch_pipelines() -> None:
    """While nobody waits; `renew_pipelines` is quick then."""
    schedules: Any = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is not None:
        watch(schedules._PipelineSchedule)


def renew_pipelines() -> None:
    """Have the next step of every schedule begin as the first. Raises RuntimeError when this torch
    keeps elsewhere whether it does."""
    schedules: Any = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is None:
        return
    for schedule in instances(schedules._PipelineSchedule):
        flags = [flag for flag in FLAGS if hasattr(schedule, flag)]
        if not flags:
            raise RuntimeError(
                f"{type(schedule).__name__}: expected one of {', '.join(FLAGS)}, found none; torch "
                f"{torch.__version__} cannot have its pipeline's stages meet again"
            )
        for flag in flags:
            setattr(schedule, flag, False)
