"""Timeline: which checkpoints of a store belong to what the job goes on from, and which were left
behind.

Each epoch goes on from a step. What an older epoch had computed beyond that step was abandoned: a
later resume does not take it, though its step is higher, and the step is written again when it is
computed again.

Comes in: what manifests say. Goes out: the checkpoints that count, newest first, and why each of
the others does not. Never touches the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Protocol, TypeVar

from keepstep.model.checkpoint import CheckpointName, Timeline


class Published(Protocol):
    """A checkpoint, as its manifest tells."""

    @property
    def name(self) -> CheckpointName:
        """Its own."""

    @property
    def timeline(self) -> Timeline | None:
        """In which it was written; None: nobody said."""


P = TypeVar("P", bound=Published)


def timelines_of(published: Iterable[Published]) -> frozenset[Timeline]:
    """All that are told of."""
    return frozenset(each.timeline for each in published if each.timeline is not None)


def left_at(name: CheckpointName, timelines: Set[Timeline]) -> int | None:
    """The step before it from which a later epoch went on; None: it counts."""
    steps = (line.step for line in timelines if line.epoch > name.epoch and line.step < name.step)
    return min(steps, default=None)


def history(
    published: Iterable[P], doubted: Set[CheckpointName] = frozenset()
) -> tuple[list[P], dict[CheckpointName, str]]:
    """Those that count, one a step and newest first; and of all others why they do not. `doubted`:
    do not count themselves; what they tell of the job's way does."""
    newest_first = sorted(published, key=lambda each: each.name, reverse=True)
    timelines = timelines_of(newest_first)
    counting: dict[int, P] = {}
    others: dict[CheckpointName, str] = {}
    for each in newest_first:
        name = each.name
        step = left_at(name, timelines)
        if step is not None:
            others[name] = f"the job went on from step {step}, before it"
        elif name in doubted:
            others[name] = "its numbers are in doubt"
        elif name.step in counting:
            others[name] = f"step {name.step} was written again"
        else:
            counting[name.step] = each
    return list(counting.values()), others


def is_overtaken(epoch: int, published: Iterable[Published]) -> bool:
    """Whether somebody has written in a later epoch: who writes in this one is of yesterday, and
    removes nothing."""
    return any(line.epoch > epoch for line in timelines_of(published))
