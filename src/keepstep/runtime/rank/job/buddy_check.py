"""Buddy check: how a job and the buddy of its gradients (`edge/torch/buddy.py`) hear of each
other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keepstep.core.detection.buddies import Pair, Repeatability, pair_of, sentence
from keepstep.errors import ConfigError, CorruptionError
from keepstep.model.events import WARNING
from keepstep.ports import Journal

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from keepstep.edge.torch.buddy import Buddy, Found
    from keepstep.runtime.rank.rank import Rank


class BuddyCheck:
    """See `BuddyHost`. `call`: tells the rank something, on the trainer's thread."""

    def __init__(
        self, rank: Rank, number: int, journal: Journal, call: Callable[..., object]
    ) -> None:
        self._rank, self._number, self._journal, self._call = rank, number, journal, call
        self._every_steps = 0
        self._repeatability = Repeatability()

    def make(
        self, model: Any, compute: Any, every_steps: int, optimizers: Sequence[Optimizer]
    ) -> tuple[Buddy, list[RemovableHandle]]:
        """The buddy itself, and the hooks that bring it in front of updates. Raises ConfigError."""
        if every_steps < 1:
            raise ConfigError(f"buddy(): expected every_steps of 1 or more, found {every_steps}")
        self._every_steps = every_steps
        # torch's communication hooks are imported with it: only who wants one waits for them
        from keepstep.edge.torch.buddy import Buddy

        buddy = Buddy(self, model, compute, self._number)
        return buddy, [o.register_step_pre_hook(buddy.before_update) for o in optimizers]

    def buddy_step(self) -> int:
        return self._rank.step + 1

    def buddy_pair(self, size: int) -> Pair | None:
        if self._repeatability.is_off:
            return None
        return pair_of(self.buddy_step(), self._rank.epoch, size, self._every_steps)

    def buddy_peers(self) -> None:
        self._call(self._rank.before_update)

    def buddy_heard(self, found: Found) -> None:
        if self._repeatability.heard(agrees=not found.names):
            self._accuse(found)
        elif found.names and self._number == found.checked:
            why = (
                f"the gradients of {len(found.names)} of {found.total} parameters are others when "
                "they are computed again: nobody's are checked any more"
            )
            self._journal.record("not-repeatable", why, WARNING)

    def _accuse(self, found: Found) -> None:
        if self._number != found.checked:
            return
        pair = found.checked, found.buddy
        why = sentence(found.step, *pair, found.names, found.total)
        told = {"step": found.step, "rank": found.checked, "ranks": list(pair)}
        self._journal.record("gradient-differs", why, WARNING, **told)
        raise CorruptionError(f"{why}; nothing was updated with it, and the step is done again")
