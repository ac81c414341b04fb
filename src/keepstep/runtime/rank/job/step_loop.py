"""Step loop: where the program's steps begin and end.

Comes in: that the program asks for a step, enters and leaves its body, and is done with it. Goes
out: the number of the step, and at its boundary whether it counts; to the rank, the measure, the
data and the numbers, that it begins or ends.

Never captures or restores anything itself: that is the rank's, under the driver's lock.
Invariant: at most one step is open; `is_finished` only when a loop ran to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from keepstep.edge.torch.job_data import JobData
from keepstep.errors import ConfigError
from keepstep.model.events import WARNING
from keepstep.model.step_work import Section
from keepstep.ports import Journal, LiveState
from keepstep.runtime.rank.device_pace import wait_for_snapshot
from keepstep.runtime.rank.driver import Driver
from keepstep.runtime.rank.job.reports import Reports
from keepstep.runtime.rank.last_step import wait_for_room
from keepstep.runtime.rank.rank import Rank
from keepstep.runtime.rank.step import Step
from keepstep.runtime.rank.step_measure import StepMeasure
from keepstep.runtime.rank.step_numbers import NumbersOfProcess

SEALED_WITHIN_S = 60.0


class StepLoop:
    """Of one job, on the trainer's thread."""

    def __init__(
        self,
        rank: Rank,
        driver: Driver,
        data: JobData,
        numbers: NumbersOfProcess,
        measure: StepMeasure,
        reports: Reports,
        journal: Journal,
        live: LiveState,
        speaks: bool,
        over: Callable[[], object],
    ) -> None:
        """speaks: for all ranks. over: hears that no step follows the last one."""
        self._rank, self._driver = rank, driver
        self._data, self._numbers = data, numbers
        self._measure, self._reports = measure, reports
        self._journal, self._live, self._speaks, self._over = journal, live, speaks, over
        self._open: tuple[Step, int] | None = None  # and when it began
        self._is_closed = False
        self.is_finished = False

    @property
    def open_step(self) -> int | None:
        """The one that has begun and not ended."""
        return None if self._open is None else int(self._open[0])

    def close(self) -> None:
        """No step follows: a loop that runs ends where it is."""
        self._is_closed = True

    def run(self, total_steps: int) -> Iterator[Step]:
        """See `Job.steps`."""
        rank = self._rank
        self._open = None  # of a loop that was left in the middle of a body
        self._data.loop_begins()
        if rank.step + 1 >= total_steps and self._speaks:
            why = (
                f"nothing is left to do: step {rank.step} was done before, and {total_steps} are "
                "wanted; for more, ask for more steps, or start over"
            )
            self._journal.record("nothing-left", why, WARNING, step=rank.step)
        while rank.step + 1 < total_steps:
            self._wait_for_turn()
            if rank.step + 1 >= total_steps:
                break
            step = self.begin()
            yield step
            if self._is_closed:
                return
            self.end(is_last=step == total_steps - 1)
        self._over()
        self.drain(rank.end_steps, SEALED_WITHIN_S)
        self.is_finished = True

    def begin(self) -> Step:
        """See `Job.step_begin`."""
        if self._open is not None:
            raise ConfigError(
                f"step_begin(): step {self._open[0]} has begun and not ended; expected "
                "step_end() before"
            )
        self._wait_for_turn()
        while not self._numbers.prepare(self._rank.step + 1):
            self._wait_for_turn()
        self._data.step_begins(self._rank.epoch, self._rank.resumed_at)
        self._measure.begin()
        number = self._driver.call(self._rank.begin_step)
        self._numbers.begin(number)
        self._reports.step_begins()
        step = Step.of(number, self._body_entered, self._body_left)
        self._open = step, time.monotonic_ns()
        self._measure.step_begun()
        return step

    def end(self, is_last: bool) -> bool:
        """See `Job.step_end`."""
        if self._open is None:
            raise ConfigError("step_end(): no step has begun; expected step_begin() before")
        step, began_ns = self._open
        self._open = None
        self._measure.enter(Section.HOOK)
        self._data.step_ends()
        step_ns = time.monotonic_ns() - began_ns
        if not self._numbers.counts(int(step), self._reports.loss_now, step.entered, is_last):
            return False
        wait_for_snapshot(self._rank, self._driver, self._live)
        if is_last:
            wait_for_room(self._rank, self._driver, self._journal)
        return self._capture(step, step_ns, is_last)

    def drain(self, ask: Callable[[Callable[[], None]], None], within_s: float) -> bool:
        """Whether all that is being captured is sealed, or given up, in time. `ask`: the rank's
        method that says when."""
        over: list[bool] = []
        self._driver.call(ask, lambda: over.append(True))
        return self._driver.wait(lambda: bool(over), within_s)

    def _wait_for_turn(self) -> None:
        self._measure.enter(Section.HOOK)
        rank = self._rank
        self._driver.wait(lambda: rank.may_begin_step() or rank.error is not None)
        if rank.error is not None:
            raise rank.error

    def _body_entered(self, step: int) -> None:
        self._driver.call(self._rank.body_entered, step)
        self._measure.body_entered()

    def _body_left(self) -> bool:
        self._measure.enter(Section.HOOK)
        is_lost = self._driver.call(self._rank.body_left)
        self._measure.enter(Section.COMPUTE)
        return is_lost

    def _capture(self, step: Step, step_ns: int, is_last: bool) -> bool:
        began_ns = time.perf_counter_ns()
        counts = self._driver.call(
            self._rank.end_step, step.entered, step.ended, step_ns, self._reports.loss, is_last
        )
        if counts:
            self._rank.stalled(time.perf_counter_ns() - began_ns, is_boundary=True)
            self._measure.step_ended(int(step), self._rank.epoch)
        return counts
