"""Boundary: the one place in a framework's loop where a step ends and the next one begins.

It lies where the batch of the next step has been fetched and nothing has been done with it. All
that the framework does between two steps, such as logging and validation, then belongs to the step
before; and the random numbers that a restarted process draws until it gets there are put back
there.
"""

from __future__ import annotations

from keepstep.edge.torch.rng import read_rng, write_rng
from keepstep.integrations.marks import Mark, Marks
from keepstep.runtime.rank.session import Job


class Boundary:
    def __init__(self, job: Job, mark: Mark | None = None) -> None:
        """Right behind `protect`. `mark`: tells a tracker of an incident; rank 0 alone calls it,
        and not before the first step: a framework begins its trackers late."""
        self.job = job
        self._mark = mark if job.rank == 0 else None
        self._marks: Marks | None = None
        job.places_own_data()
        self._restored = read_rng() if job.step >= 0 else None
        self._is_in_step = False

    def reached(self, is_last: bool = False) -> None:
        """A step has ended, unless this is before the first one, and another begins, unless
        `is_last`."""
        if self._is_in_step:
            self.job.step_end(is_last)
        elif self._restored is not None:
            write_rng(self._restored)
        self._look()
        if not is_last:
            self.job.step_begin()
        self._is_in_step = not is_last

    def _look(self) -> None:
        if self._marks is not None:
            self._marks.look()
        elif self._mark is not None:
            self._marks = Marks(self.job, self._mark)

    def end(self) -> None:
        """The last step has ended, and with it the training."""
        if self._is_in_step:
            self.job.step_end(is_last=True)
            self._is_in_step = False
        self.job.close()
