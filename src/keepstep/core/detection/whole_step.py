"""Whole step: how much more a rank does in all of its steps than others, section beside section.

Comes in: blocks of the same steps, of one rank and of others. Goes out: a ratio in log space, the
median of all blocks. On a device a wait for others may go unseen (in C++, or by an event): it then
counts in whatever section it lies in, and of two ranks the one that waits seems slow there, and the
one that it waits for elsewhere. Their steps as a whole are equally long then.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from keepstep.core.detection.drift import median
from keepstep.core.detection.work_measures import all_free_ns
from keepstep.model.step_work import WorkBlock


def whole_ratio(mine: Sequence[WorkBlock], others: Sequence[Sequence[WorkBlock]]) -> float:
    """0 where nothing can be compared. All end with the same block."""
    count = min(len(blocks) for blocks in (mine, *others)) if others else 0
    if count == 0:
        return 0.0
    return median(
        log((1.0 + all_free_ns(mine[-n])) / (1.0 + median(all_free_ns(one[-n]) for one in others)))
        for n in range(1, count + 1)
    )
