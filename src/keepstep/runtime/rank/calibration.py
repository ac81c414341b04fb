"""Calibration: an early step in which nothing is wrong is run again on purpose, so that it is known
whether steps repeat bit for bit here before anybody is accused by that.

    step 3 after a start or a regroup -> watched, all stand behind it -> taken back and run again,
    so many times -> what all have seen says how far apart runs are -> told once

Comes in: what all ranks saw behind that step. Goes out: whether it is to be run again; at the end
how far apart two runs may be (`core/numbers/repeats.py`), and a line in the journal. Takes nothing
back itself: that is `doubt.py`'s.

Invariant: all ranks answer alike, from the same evidence; a step is run at most `runs` times more
for it, and never the last one.
"""

from __future__ import annotations

from keepstep.core.numbers.inquiry import can_go_behind
from keepstep.core.numbers.repeats import Repeats, calibrated
from keepstep.model.numbers import StepRun, Way
from keepstep.runtime.rank.numbers_journal import NumbersJournal

# Behind what all have resumed from: the state of an optimizer, and a snapshot with it, are there.
STEPS_BEFORE = 3


class Calibration:
    """Of one rank. `runs`: so many times more the step is run; 0: never."""

    def __init__(self, told: NumbersJournal, runs: int) -> None:
        self._told, self._wanted = told, runs
        self._due: int | None = None
        self._runs: list[StepRun] = []
        self._found: Repeats | None = None
        self._is_over = runs == 0

    @property
    def within(self) -> float:
        """So far apart runs of one state and batch may be; 0: bit for bit, or not known."""
        return 0.0 if self._found is None else self._found.within

    def start_anew(self) -> None:
        """Some peers are others now, and know of none."""
        self._due, self._runs, self._found = None, [], None
        self._is_over = self._wanted == 0

    def begins(self, resumed_at: int) -> None:
        """A body begins. What all have resumed from is the same on all ranks."""
        if self._due is None:
            self._due = resumed_at + STEPS_BEFORE

    def is_due(self, step: int) -> bool:
        return not self._is_over and step == self._due

    def heard(self, step: int, run: StepRun, is_last: bool) -> bool:
        """Behind that step nobody saw anything wrong: whether it is to be run again."""
        if is_last or not can_go_behind(step, run.seen):
            why = "no step follows" if is_last else "no step can be taken back yet, or at all"
            self.failed(step, why)
            return False
        self._runs.append(StepRun(Way.AGAIN, run.seen))
        if len(self._runs) <= self._wanted:
            return True
        self._is_over = True
        self._found = calibrated(step, self._runs)
        self._told.repeats(step, self._found)
        self._runs = []
        return False

    def failed(self, step: int, why: str) -> None:
        """It cannot be had here."""
        self._is_over = True
        self._told.not_calibrated(step, why)
