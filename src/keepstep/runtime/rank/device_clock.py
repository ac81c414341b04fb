"""Device clock: what a rank's device does in a step, by section, and what it waits for others.

    the trainer enters a section, waits in a collective, ends a step
    -> marks between what it orders; when the device has come by, the same record of sums
       (`step_clock.py`) with the device's time in it

The trainer is ahead of its device: its own time says nothing of what is computed. So behind what it
has ordered until a section ends a mark is ordered, too, and the time between two marks is that
section's, whenever the device comes to it. A device that stands still because its trainer orders
nothing is charged with that: the others will wait for it as well. What passes while the trainer
waits in a collective is left out: for a collective of the host the device has nothing to do then,
and of a device's it is the time for which the trainer's stream stands behind it, or runs it itself.

Marks are asked, never waited for, when a step ends: those that the device has passed by then are
read, and a record goes out when the device has passed its step's end, some steps later. Called on
the trainer's thread, but for where a backward pass begins and ends, which the thread tells that
computes gradients; a wait on another one is not seen, and counts as the rank's own.

Invariant: the time of all sections but the passes, which are parts of the body, and the waits add
up to the device's time between the first mark that was read and the last one. Marks are at most
`MOST_MARKS`: beyond them, what passes counts for the section before, and for no pass. No mark is
used again before it was read. A device that has failed is the program's to find: nothing is
measured any more, and nothing is raised here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from keepstep.model.step_work import Section, StepWork
from keepstep.ports import DeviceMarks
from keepstep.runtime.rank.step_clock import NO_PASS, SECTIONS, UNTOLD

MOST_MARKS = 4096
_WAITS = SECTIONS + 1


class _Stretch(NamedTuple):
    """What follows a mark, up to the next one. part: the pass within the section. works: of steps
    that had ended at the mark."""

    mark: Any
    section: int
    part: int
    works: tuple[StepWork, ...]


class DeviceClock:
    """Of one rank's trainer thread, which makes it."""

    def __init__(self, marks: DeviceMarks, write: Callable[[StepWork], None]) -> None:
        self._marks, self._write = marks, write
        self._thread = threading.get_ident()
        self._lock = threading.RLock()  # as the step clock's
        self._section, self._part = int(Section.HOOK), NO_PASS
        self._under_way: deque[_Stretch] = deque()
        self._unmarked: tuple[StepWork, ...] = ()  # ended, and no mark could be made since
        self._sums = [0] * (SECTIONS + 2)
        self._waiting = 0
        self._has_failed = False
        self._mark(())

    @property
    def wait_ns(self) -> int:
        return self._sums[_WAITS]

    def enter(self, section: int, part: int = NO_PASS) -> None:
        """What is ordered from now on is that section's, and of that pass in it."""
        with self._lock:
            if (section, part) != (self._section, self._part):
                self._section, self._part = section, part
                self._mark(())

    def disown(self, part: int) -> None:
        """What was ordered last, of that pass, is of none."""
        with self._lock:
            kept = deque[_Stretch]()
            while self._under_way and self._under_way[-1].part == part:
                kept.appendleft(self._under_way.pop()._replace(part=NO_PASS))
            self._under_way += kept

    def settle(self, section: int) -> None:
        """What was nobody's yet is that section's."""
        with self._lock:
            self._settle(section)

    def _settle(self, section: int) -> None:
        if any(stretch.section == UNTOLD for stretch in self._under_way):
            told = (
                stretch._replace(section=section) if stretch.section == UNTOLD else stretch
                for stretch in self._under_way
            )
            self._under_way = deque(told)
        if self._section == UNTOLD:
            self._section = section

    def waits(self, begins: bool) -> None:
        """Somebody begins to wait in a collective, or has waited."""
        if threading.get_ident() != self._thread:
            return
        with self._lock:
            before = self._waiting
            self._waiting = max(0, before + (1 if begins else -1))
            if bool(before) != bool(self._waiting):
                self._mark(())

    def step_ended(self, work: StepWork) -> None:
        """The step counts: its record is written when the device has done it."""
        with self._lock:
            self._section, self._part = int(Section.DATA), NO_PASS
            self._mark((work,))
            self._read()

    def close(self) -> None:
        """Nothing is measured any more; what the device has done by now is told."""
        with self._lock:
            self._read()
            self._under_way.clear()

    def _mark(self, works: tuple[StepWork, ...]) -> None:
        self._unmarked += works
        if self._has_failed:
            return
        try:
            mark = self._marks.make() if len(self._under_way) < MOST_MARKS else None
        except RuntimeError:
            self._has_failed = True
            return
        if mark is None:  # where a pass ends is not known, then
            if self._under_way:
                self._under_way[-1] = self._under_way[-1]._replace(part=NO_PASS)
            return
        section = _WAITS if self._waiting else self._section
        self._under_way.append(_Stretch(mark, section, self._part, self._unmarked))
        self._unmarked = ()

    def _read(self) -> None:
        """As far as the device has come: as a step ends, when all sections are settled."""
        try:
            while self._read_one():
                pass
        except RuntimeError:
            self._has_failed = True

    def _read_one(self) -> bool:
        if self._has_failed or len(self._under_way) < 2:
            return False
        first, second = self._under_way[0], self._under_way[1]
        if not self._marks.is_over(second.mark):
            return False
        passed = self._marks.between_ns(first.mark, second.mark)
        self._sums[first.section] += passed
        if first.section == Section.COMPUTE and first.part != NO_PASS:
            self._sums[first.part] += passed
        self._marks.take_back(self._under_way.popleft().mark)
        for work in second.works:
            self._write(work._replace(device_ns=tuple(self._sums[:SECTIONS])))
        return True
