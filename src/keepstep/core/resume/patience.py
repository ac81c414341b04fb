"""Patience: how long all wait for a store that does not answer, and how often they ask it again.

Comes in: when it was asked, and when it did not answer. Goes out: when to ask again, or that it is
enough: an error then, and never a fresh start. Nobody is told of a store that answers soon.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.model.units import S_NS

FIRST_NS = 1 * S_NS
MOST_NS = 15 * S_NS
IN_ALL_NS = 300 * S_NS
TELL_EVERY_NS = 15 * S_NS


@dataclass
class StorePatience:
    """With one question. `told_ns`: when somebody last heard that all wait."""

    began_ns: int
    failures: int = 0
    told_ns: int | None = None

    def next_try_after_ns(self, now_ns: int) -> int | None:
        """It has not answered: how long to wait before the next question; None: no more."""
        pause_ns = pause_before(self.failures)
        self.failures += 1
        return pause_ns if now_ns + pause_ns - self.began_ns <= IN_ALL_NS else None

    def is_to_be_told(self, now_ns: int) -> bool:
        """Whether somebody is to hear now that all wait; true at most every `TELL_EVERY_NS`."""
        if now_ns - (self.began_ns if self.told_ns is None else self.told_ns) < TELL_EVERY_NS:
            return False
        self.told_ns = now_ns
        return True


def pause_before(failures: int) -> int:
    """Nanoseconds between the question that failed after `failures` others, and the next."""
    return min(MOST_NS, FIRST_NS << min(failures, 10))
