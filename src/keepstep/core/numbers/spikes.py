"""Spikes: is a step's loss or gradient norm out of all proportion to those before?

Comes in: each step's gradient norm, by which optimizers it updated, and its loss. Goes out: a sign,
or none. Judged in log space, so that neither the scale nor a slow descent matters.

    EXPLOSION   norm so great that its square is no float32: what an optimizer makes of that is not
                finite. Where spikes are asked for: also > 100 times the greatest of the last 64,
                z > 8, and greater than all parameters together
    SPIKE       where that is asked for: norm > 10 and loss > 3 times the median of the last 64,
                z > 8 and greater than any of them, both

Asked for, because healthy trainings do the same: other data, a layer that is drawn anew, a reward
after a long time.

A step without a gradient (a hinge that is met, a reward that does not come) says nothing of how
great gradients are: only what is not zero counts. Optimizers that take turns have each their own
level. A floor under the MAD keeps what a training does on purpose (another learning rate, a
warm-up, harder data) from being called a fault.

A level that stays is no spike: after `LEVEL_STEPS` steps in a row that were told and went on, it is
what is normal. Values that are not finite are no spikes either: others look for them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence

from keepstep.model.numbers import OVERFLOW, Sign

WINDOW_STEPS = 64
LEAST_STEPS = 32  # accepted ones, before anything is judged
MAD_FLOOR = 0.02
TO_SIGMA = 1.4826  # of a normal distribution, from its MAD
FAR_Z = 8.0
EXPLOSION = math.log(100.0)
SPIKE_NORM = math.log(10.0)
SPIKE_LOSS = math.log(3.0)
LEVEL_STEPS = 3


class Spikes:
    """Of one training, on one rank. `compares`: with the steps before; else nothing but a norm of
    its own is judged."""

    def __init__(self, compares: bool = False) -> None:
        self._compares = compares
        self._norms: dict[Hashable, deque[float]] = {}
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._told_in_a_row = 0

    def may_be_far(self, norm: float) -> bool:
        """Whether `look` may ask for the parameters' norm, whichever optimizers have updated."""
        if not self._compares:
            return False
        least = min((max(before) for before in self._norms.values()), default=math.inf)
        return math.log(norm) - least > SPIKE_NORM

    def look(
        self, norm: float | None, loss: float | None, size: float = 0.0, by: Hashable = None
    ) -> Sign | None:
        """Judge one step's values; None where there is none. `size`: the norm of all parameters
        that were updated; 0: not known. `by`: which optimizers did. Changes nothing."""
        if norm is None or not math.isfinite(norm):
            return None
        if norm > OVERFLOW:
            return Sign.EXPLOSION
        if not self._compares or self._told_in_a_row >= LEVEL_STEPS:
            return None
        over = self._over(norm, by)
        if over <= 0:
            return None  # of nearly every step: nothing need be sorted
        value, before = math.log(norm), self._norms[by]
        if over > EXPLOSION and norm > size and _is_far(value, before):
            return Sign.EXPLOSION
        if loss is None or not _counts(loss):
            return None
        if len(self._losses) < LEAST_STEPS or math.log(loss) <= max(self._losses):
            return None
        is_great = value - _median(before) > SPIKE_NORM and _is_far(value, before)
        level = _median(self._losses)
        is_high = math.log(loss) - level > SPIKE_LOSS and _is_far(math.log(loss), self._losses)
        return Sign.SPIKE if is_great and is_high else None

    def accept(
        self, norm: float | None, loss: float | None, size: float = 0.0, by: Hashable = None
    ) -> None:
        """A step counts, with these values. One that was told and counts all the same may be the
        first of another level."""
        if self.look(norm, loss, size, by) is not None:
            self._told_in_a_row += 1
            if self._told_in_a_row < LEVEL_STEPS:
                return
            self._norms.pop(by, None)
            self._losses.clear()
        self._told_in_a_row = 0
        if norm is not None and _counts(norm):
            self._norms.setdefault(by, deque(maxlen=WINDOW_STEPS)).append(math.log(norm))
        if loss is not None and _counts(loss):
            self._losses.append(math.log(loss))

    def _over(self, norm: float, by: Hashable) -> float:
        """By how much, in log space, it lies above the greatest before; below 0 where too few are
        known."""
        before = self._norms.get(by, ())
        if not _counts(norm) or len(before) < LEAST_STEPS:
            return -math.inf
        return math.log(norm) - max(before)


def _counts(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _is_far(value: float, before: Sequence[float]) -> bool:
    """Above the median, for values that vary as these do."""
    middle = _median(before)
    spread = TO_SIGMA * max(MAD_FLOOR, _median([abs(v - middle) for v in before]))
    return value - middle > FAR_Z * spread


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
