"""Checkpoint requests: steps that the program, or a SIGTERM, wants in the store.

Comes in: that one is asked for, on the trainer's thread or on that of signals. Goes out: a future
of what became of it, and the trainer's wait, if it waits. What is written, and when, is decided by
the rank and its keeper.
"""

from __future__ import annotations

import time
from concurrent.futures import Future

from keepstep.errors import StoreError
from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.model.snapshot import Phase
from keepstep.ports import Journal
from keepstep.runtime.rank.driver import Driver
from keepstep.runtime.rank.rank import Rank
from keepstep.runtime.rank.step_measure import StepMeasure

PREEMPTED_WITHIN_S = 600.0


class CheckpointRequests:
    """Of one job."""

    def __init__(
        self,
        rank: Rank,
        number: int,
        driver: Driver,
        measure: StepMeasure,
        journal: Journal,
        kept_s: float | None,
    ) -> None:
        """number: this rank's. kept_s: so long memory stays when the process has ended, in a job
        without a store; None where there is one."""
        self._rank, self._number, self._kept_s = rank, number, kept_s
        self._driver, self._measure, self._journal = driver, measure, journal

    def of_last_step(self, wait: bool, steps_follow: bool) -> Future[CheckpointDone]:
        """See `Job.persist`."""
        step = self._rank.step
        self._rank.announce(Phase.PERSIST, step)
        began_ns = time.monotonic_ns()
        future = self._ask(step, "asked for by job.persist()", steps_follow and not wait)
        if wait:
            self._measure.announced(Phase.PERSIST)
            outcome = future.result()
            self._measure.announced(Phase.STEP)
            self._rank.waited(time.monotonic_ns() - began_ns)
            if not outcome.ok:
                is_skipped = outcome.step is not None and outcome.step < step
                hint = ". Without wait=True the next captured step is stored" if is_skipped else ""
                raise StoreError(f"step {step} could not be persisted: {outcome.why}{hint}")
        return future

    def preempted(self) -> None:
        """On the signal thread: the newest committed step goes to the store, whatever the trainer's
        thread is doing."""
        step, kept_s = self._rank.step, self._kept_s
        which = f"{step} or one just before it" if step >= 0 else "none is completed yet"
        if kept_s is None:
            told = (
                f"SIGTERM: writing the newest step that every rank holds to the store ({which}); "
                "the process ends then"
            )
        elif step < 0:
            told = "SIGTERM: nothing is lost, no step is completed yet"
        else:
            told = (
                f"SIGTERM after step {step}: there is no store, memory is kept for {kept_s:.0f} s: "
                "the same command goes on from it"
            )
        self._journal.record("preempted", told)
        if kept_s is not None:
            return
        asked = self._ask(None, f"rank {self._number} received SIGTERM", steps_follow=False)
        outcome = asked.result(timeout=PREEMPTED_WITHIN_S)
        done = f"step {outcome.step} is in the store" if outcome.ok else "nothing is in the store"
        why = f"SIGTERM is answered: {done}: {outcome.why}"
        self._journal.record("preempted", why, ok=outcome.ok, step=outcome.step)

    def _ask(self, step: int | None, why: str, steps_follow: bool) -> Future[CheckpointDone]:
        future: Future[CheckpointDone] = Future()
        with self._driver.changed:
            self._rank.persist(step, why, future.set_result, steps_follow)
        return future
