"""Judge: what every judge of parts has in common: the form of its verdicts, and spells of looks.

Comes in: readings of one probe, in the order of time. Goes out: the health of every part that the
judge has seen so far. Invariant: a judge says OK only of what it has just been shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from keepstep.model.parts import PartHealth, PartPolicy, PartReading, PartState

# so many looks in a row make a condition that comes and goes a sickness, and end it
SPELL_LOOKS = 3


class Judge(Protocol):
    """Of one probe's readings, over time."""

    def add(self, readings: Sequence[PartReading], at_ns: int) -> list[PartHealth]:
        """One run of the probe, which was a good witness."""


def well(part: str, at_ns: int, why: str = "") -> PartHealth:
    """Nothing is wrong with it."""
    return PartHealth(part, PartState.OK.value, why, seen_ns=at_ns)


def sick(
    part: str,
    at_ns: int,
    why: str,
    fix: str,
    most: PartPolicy = PartPolicy.STOP,
    slows: bool = False,
) -> PartHealth:
    """Something is. `most`: what is done about it at the harshest. `slows`: see `PartHealth`."""
    return PartHealth(part, PartState.BAD.value, why, fix, int(most), at_ns, slows)


def unseen(part: str, at_ns: int, why: str) -> PartHealth:
    """Nobody knows."""
    return PartHealth(part, PartState.UNKNOWN.value, why, seen_ns=at_ns)


class Spell:
    """A condition that has to hold at `looks` looks in a row before it counts, and to be away as
    often before it is over."""

    def __init__(self, looks: int = SPELL_LOOKS) -> None:
        self._looks = looks
        self._against = 0  # looks in a row that contradict what holds
        self.holds = False

    def look(self, condition: bool) -> bool:
        """Whether it holds now."""
        self._against = self._against + 1 if condition != self.holds else 0
        if self._against >= self._looks:
            self.holds, self._against = condition, 0
        return self.holds
