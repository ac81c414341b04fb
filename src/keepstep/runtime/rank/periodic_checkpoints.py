"""Periodic checkpoints: those that a training asks for every n steps and does not wait for.

Comes in: each completed step and its loss, the keeper's answers. Goes out: questions for the
keeper, what is stored in words, and once each a warning when checkpoints take longer than what
lies between them, and when a rule asks for a loss that nobody reports. That checkpoints fail is
told once, then at the 10th, the 100th in a row, and when the reason is another one.

Invariant: one rank of the job asks.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.core.recovery.recurrence import normalised
from keepstep.model.events import DEBUG, ERROR, WARNING
from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.model.units import counted
from keepstep.ports import Journal
from keepstep.runtime.rank.keeper_client import Answered
from keepstep.runtime.rank.world import RankOptions

TOLD_AGAIN = 10  # times as many failures in a row as when it was told last

# step, why, who hears the outcome, whether steps follow
Persist = Callable[[int, str, Answered, bool], None]


class PeriodicCheckpoints:
    """One rank's."""

    def __init__(
        self, options: RankOptions, journal: Journal, asks: bool, persist: Persist
    ) -> None:
        """`asks`: whether this rank does so for all."""
        self._options = options
        self._journal = journal
        self._asks = asks and options.has_store
        self._persist = persist
        self._stored_step = -1  # the newest that this rank knows to be in the store
        self._awaited: list[int] = []  # steps that were asked for
        self._failed = 0
        self._failed_in_a_row = 0  # for the same reason
        self._failed_why = ""
        self._tells_at = 1  # so many in a row
        self._has_loss = False
        self._told_late = False
        self._told_no_loss = False

    def completed(self, step: int, loss: object) -> None:
        """A step is done."""
        self._has_loss = self._has_loss or loss is not None
        every = self._options.persist_every_steps
        if not self._asks or not every or (step + 1) % every:
            return
        self._tell_if_late(step, every)
        self._awaited.append(step)

        def answered(done: CheckpointDone) -> None:
            self._awaited.remove(step)
            self._answered(done)

        self._persist(step, f"every {every} steps", answered, True)

    def _answered(self, done: CheckpointDone) -> None:
        if done.ok and done.step is not None:
            self.stored(done.step)
        elif not done.ok:
            self._tell_failed(done.why)

    def _tell_failed(self, why: str) -> None:
        """A store that is full stays so for a while: not a line each time."""
        self._failed += 1
        reason = normalised(why)
        if reason != self._failed_why:
            self._failed_why = reason
            self._failed_in_a_row = 0
            self._tells_at = 1
        self._failed_in_a_row += 1
        level = DEBUG
        again = ""
        if self._failed_in_a_row == self._tells_at:
            level = ERROR
            again = "" if self._tells_at == 1 else f" ({self._failed_in_a_row} times in a row)"
            self._tells_at *= TOLD_AGAIN
        self._journal.record("not-stored", f"no checkpoint{again}: {why}", level)

    def stored(self, step: int) -> None:
        """It is in the store."""
        self._failed_why = ""
        self._stored_step = max(self._stored_step, step)
        if self._asks and self._options.keeps_by_loss and not self._has_loss:
            self._tell_no_loss()

    def _tell_if_late(self, step: int, every: int) -> None:
        if self._awaited and not self._told_late:
            self._told_late = True
            why = (
                f"the checkpoint of step {step} is asked for while that of step {self._awaited[0]} "
                f"is still being written: they take longer than {every} steps, so some are left "
                "out. Raise persist_every_steps to have them all"
            )
            self._journal.record("persist-late", why, WARNING, step=step)

    def _tell_no_loss(self) -> None:
        if not self._told_no_loss:
            self._told_no_loss = True
            why = (
                "keep has a rule best:loss, and no loss was reported, so that rule keeps no "
                "checkpoint: call job.report(loss=loss) in every step"
            )
            self._journal.record("no-loss", why, WARNING)

    def words(self) -> str:
        """What is stored."""
        if not self._options.has_store:
            return "no store"
        more = f", {counted(self._failed, 'checkpoint')} failed" if self._failed else ""
        if self._awaited:
            more += f", that of step {self._awaited[-1]} was still being written"
        if self._stored_step < 0:
            return f"nothing stored{more}"
        return f"the newest checkpoint is of step {self._stored_step}{more}"
