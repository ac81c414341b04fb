"""Patience: how long all wait for a store that does not answer, and how often they ask it again;
how long one that writes a checkpoint may stand still, and take in all.

Comes in: when it was asked, and when it did not answer; how earlier writes went. Goes out: when to
ask again, or that it is enough: an error then, and never a fresh start.

Invariant: there is an end to every wait, also for an answer that never comes: who asks ends it by
the clock (`IN_ALL_NS`; `BESIDE_MEMORY_NS`; what a write may take).
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.model.units import S_NS

FIRST_NS = 1 * S_NS
MOST_NS = 15 * S_NS
IN_ALL_NS = 300 * S_NS
TELL_EVERY_NS = 15 * S_NS
# where all could go on from memory, which is most often the newest there is
BESIDE_MEMORY_NS = 30 * S_NS

# of a write, while none has succeeded yet
FIRST_STANDSTILL_NS = 120 * S_NS
FIRST_WRITE_NS = 4 * 3600 * S_NS  # 1 TiB at 75 MiB/s
# Once some have: so many times as long as the longest of them, within bounds.
STANDSTILLS, LEAST_STANDSTILL_NS, MOST_STANDSTILL_NS = 10, 60 * S_NS, 600 * S_NS
WRITES, LEAST_WRITE_NS = 8, 600 * S_NS


@dataclass
class StorePatience:
    """With one question."""

    began_ns: int
    failures: int = 0

    def next_try_after_ns(self, now_ns: int) -> int | None:
        """It has not answered: how long to wait before the next question; None: no more."""
        pause_ns = pause_before(self.failures)
        self.failures += 1
        return pause_ns if now_ns + pause_ns - self.began_ns <= IN_ALL_NS else None


@dataclass
class WritePatience:
    """With a process that writes to the store, an act at a time. Of those that have succeeded:
    `standstill_ns`, the longest in which it did nothing; `write_ns`, the longest act. 0: none
    has."""

    standstill_ns: int = 0
    write_ns: int = 0

    def learn(self, standstill_ns: int, write_ns: int) -> None:
        """An act has succeeded."""
        self.standstill_ns = max(self.standstill_ns, standstill_ns)
        self.write_ns = max(self.write_ns, write_ns)

    @property
    def most_standstill_ns(self) -> int:
        """It may do nothing for so long; one that stands still for longer hangs."""
        if not self.write_ns:
            return FIRST_STANDSTILL_NS
        learnt_ns = STANDSTILLS * self.standstill_ns
        return min(max(learnt_ns, LEAST_STANDSTILL_NS), MOST_STANDSTILL_NS)

    @property
    def most_write_ns(self) -> int:
        """An act may take so long, however busy it is: a store that trickles never ends."""
        return max(WRITES * self.write_ns, LEAST_WRITE_NS) if self.write_ns else FIRST_WRITE_NS


@dataclass
class WriteBackoff:
    """Between attempts to write, when one was given up because the store hung. `failures`: in a
    row."""

    failures: int = 0
    until_ns: int = 0

    def hung(self, now_ns: int) -> None:
        """One more was given up now."""
        self.until_ns = now_ns + pause_before(self.failures)
        self.failures += 1

    def has_succeeded(self) -> None:
        """One has."""
        self.failures = self.until_ns = 0

    def left_ns(self, now_ns: int) -> int:
        """How long nobody is to try again."""
        return max(0, self.until_ns - now_ns)


def pause_before(failures: int) -> int:
    """Nanoseconds between the question that failed after `failures` others, and the next."""
    return min(MOST_NS, FIRST_NS << min(failures, 10))
