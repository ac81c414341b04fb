"""Cadence: which steps are captured when a capture takes longer than a step.

If each rank began its next capture as soon as its last one is sealed, ranks would begin at
different steps, and a step that all of them hold might never come. So they agree: a rank tells how
many steps its captures take, its *span*; the *period* is the longest span of all ranks; and what is
captured are the multiples of the period. Ranks that have heard of different periods for a moment
agree again as soon as they have heard of the same one, for nothing else is remembered.

Comes in: at which steps a capture began and was seen to have ended. Goes out: this rank's span, and
whether a step's turn has come.

Invariant: once all ranks follow a period that no capture exceeds, every multiple of it is held by
all, and the newest of them is less than two periods old: a capture takes up to one, and until it
has ended the one before counts. A capture that misses its turn costs one period more.
"""

from __future__ import annotations

from collections import deque

REMEMBERED_CAPTURES = 10
HICCUP_RATIO = 2  # one among those that takes more than so many times the next slowest is no rule


class Cadence:
    """How long one rank's captures take, counted in step boundaries."""

    def __init__(self) -> None:
        self._spans: deque[int] = deque(maxlen=REMEMBERED_CAPTURES)
        self._began_step: int | None = None  # of a capture that was not seen to have ended

    def begins(self, step: int) -> None:
        """A capture of `step` begins."""
        self._began_step = step

    def boundary(self, step: int, is_writing: bool) -> None:
        """The boundary of `step`; `is_writing`: the last capture has not ended."""
        if self._began_step is None or is_writing:
            return
        self._spans.append(max(1, step - self._began_step))
        self._began_step = None

    @property
    def span_steps(self) -> int:
        """So many boundaries after a capture has begun, the next can begin: the slowest of the last
        few, but for a hiccup."""
        slowest = sorted(self._spans, reverse=True)[:2]
        if not slowest:
            return 1
        return slowest[-1] if slowest[0] > HICCUP_RATIO * slowest[-1] else slowest[0]


def is_due(step: int, period_steps: int) -> bool:
    """Whether all ranks capture this step."""
    return step % max(1, period_steps) == 0


def at_most_lost_steps(period_steps: int) -> int:
    """So many completed steps does a killed process cost, when every capture keeps the period."""
    return 2 * period_steps - 1
