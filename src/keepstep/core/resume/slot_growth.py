"""Slot growth: whether a rank needs one slot more than it has.

Comes in: steps whose snapshot found no slot free. Goes out: that one more is wanted. A single such
step is bad luck (a slow peer, a reader), and memory that is taken is not given back: some of them,
within not too many steps, say that commits lag by more than the slots allow.
"""

from __future__ import annotations

from collections import deque

FULL_STEPS = 3
WITHIN_STEPS = 1000


class SlotGrowth:
    """Of one rank."""

    def __init__(self) -> None:
        self._full: deque[int] = deque(maxlen=FULL_STEPS)

    def found_none_free(self, step: int) -> bool:
        """The snapshot of that step. True when one more slot is wanted, and the count begins
        anew."""
        self._full.append(step)
        is_wanted = len(self._full) == FULL_STEPS and step - self._full[0] < WITHIN_STEPS
        if is_wanted:
            self._full.clear()
        return is_wanted
