"""Optimizer hooks: what happens right before and behind each optimizer's update.

Comes in: torch's calls of them, on the trainer's thread. Goes out: the copy of what the update is
about to overwrite has been waited for, and what is wrong with its gradients seen; the time of that
is told as a stall.

Invariant: no update begins while a copy still reads what it writes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from keepstep.edge.torch.foremost import register_foremost
from keepstep.edge.torch.state import Protected
from keepstep.model.step_work import Section
from keepstep.runtime.rank.driver import Driver
from keepstep.runtime.rank.rank import Rank
from keepstep.runtime.rank.step_measure import StepMeasure
from keepstep.runtime.rank.step_numbers import NumbersOfProcess

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class OptimizerHooks:
    """Of all protected optimizers, from here on until `remove`."""

    def __init__(
        self,
        protected: Protected,
        rank: Rank,
        driver: Driver,
        numbers: NumbersOfProcess,
        measure: StepMeasure,
    ) -> None:
        self._protected, self._rank, self._driver = protected, rank, driver
        self._numbers, self._measure = numbers, measure
        optimizers = protected.optimizers
        updated = protected.used_gradients.updated
        # what the program has an optimizer do before its step is a part of the update
        self._handles = [register_foremost(o, measure.update_begun) for o in optimizers]
        self._handles += [o.register_step_pre_hook(self._before_update) for o in optimizers]
        self._handles += [o.register_step_post_hook(updated) for o in optimizers]
        self._handles += [o.register_step_post_hook(numbers.updated) for o in optimizers]
        self._handles += [o.register_step_post_hook(measure.updated) for o in optimizers]

    def add(self, handles: Iterable[RemovableHandle]) -> None:
        """Others', which are to go with these."""
        self._handles += handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        began_ns = time.perf_counter_ns()
        self._measure.before_update()
        self._protected.updates(optimizer)
        copy = self._rank.before_update()
        if copy is not None and copy.fence(optimizer):
            self._driver.call(self._rank.fenced)
        self._numbers.before_update(optimizer, args, kwargs, copy)
        self._rank.stalled(time.perf_counter_ns() - began_ns, is_boundary=False)
        self._measure.enter(Section.UPDATE)
