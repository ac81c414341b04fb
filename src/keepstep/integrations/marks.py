"""Marks: a training's incidents on the curves of Weights & Biases, TensorBoard or MLflow.

    marks = Marks(job, tensorboard_mark(SummaryWriter()))    # rank 0 alone
    for step in job.steps(1000):
        ...
        marks.look()                                         # cheap: once a second at most

Moves what the journal says of recoveries to a tracker; decides nothing. Comes in: a job. Goes out:
one mark for each recovery, at the step from which the training went on. Never raises for a tracker
that fails: a curve without a mark is better than a training that ends.

Invariant: an incident that this process sees, or that it is the first to train after, is marked
once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from keepstep.core.economics.journal_kinds import loss_of
from keepstep.edge.os.journal import JournalTail, read_journal
from keepstep.model.events import Event
from keepstep.runtime.rank.session import Job

EVERY_S = 1.0
BACK = ("resumed", "go")
CAUSES = {"rank-exited", "node-lost", "diagnosis", "agent-restarted", "wrong-numbers"}

log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class Incident:
    """`step`: the one it went on from. `lost_steps`: None: nobody knows how many. `text`: what
    happened, and from where it went on."""

    step: int
    lost_steps: int | None
    text: str


Mark = Callable[[Incident], None]


class Marks:
    """Of one job, in one process: let rank 0 have it."""

    def __init__(self, job: Job, mark: Mark, clock: Callable[[], float] = time.monotonic) -> None:
        """The recovery that brought this process here is marked at once.

        Args:
            job: what `protect` has returned.
            mark: tells the tracker; it is called in a thread of its own, and may wait.
            clock: seconds, which only grow.
        """
        self._mark, self._clock = mark, clock
        self._thread = ThreadPoolExecutor(1, "keepstep-marks")  # a tracker may wait for a network
        path = job.settings.journal_path
        self._tail = JournalTail(path, from_its_end=True, owner=os.geteuid())
        self._cause = ""
        self._told: tuple[int, int] | None = None  # step and epoch of the last one
        self._next_s = clock() + EVERY_S
        last: dict[bool, Event] = {}
        for event in read_journal(path, os.geteuid()):
            if event.kind in CAUSES or event.kind in BACK:
                last[event.kind in BACK] = event
        if True in last and job.step >= 0:
            self._cause = last[False].why if False in last else ""
            self._hear(last[True])

    def look(self) -> None:
        """Mark what came since; does nothing but look at the clock until a second is over."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        for event in self._tail.read():
            if event.kind in CAUSES:
                self._cause = event.why
            elif event.kind in BACK:
                self._hear(event)

    def _hear(self, event: Event) -> None:
        step, epoch = event.data.get("step"), event.data.get("epoch", 0)
        if event.data.get("source") == "fresh" or not isinstance(step, int) or step < 0:
            return
        if (step, epoch) == self._told:
            return  # each node's keeper says so
        self._told = step, epoch
        text = "; ".join(filter(None, (self._cause, event.why)))
        self._cause = ""
        incident = Incident(step, loss_of(event)[0], text)
        self._thread.submit(self._mark, incident).add_done_callback(_tell_failed)


def _tell_failed(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        told = f"{type(error).__name__}: {error}"
        log.warning("the tracker did not take the mark of an incident (%s) [KS5106]", told)


def wandb_mark(run: Any, alerts: bool = False) -> Mark:
    """Marks on the curves of Weights & Biases.

    Args:
        run: of `wandb.init`.
        alerts: also an alert, which W&B sends on.

    Returns:
        What `Marks` calls with each `Incident`.
    """

    def mark(incident: Incident) -> None:
        told = {"keepstep/resumed_step": incident.step, "keepstep/incident": incident.text}
        if incident.lost_steps is not None:
            told["keepstep/lost_steps"] = incident.lost_steps
        run.log(told)
        if alerts:
            run.alert(title="keepstep: the training went on", text=incident.text)

    return mark


def tensorboard_mark(writer: Any) -> Mark:
    """Marks on the curves of TensorBoard.

    Args:
        writer: a `SummaryWriter`.

    Returns:
        What `Marks` calls with each `Incident`.
    """

    def mark(incident: Incident) -> None:
        if incident.lost_steps is not None:
            writer.add_scalar("keepstep/lost_steps", incident.lost_steps, incident.step)
        writer.add_text("keepstep/incident", incident.text, incident.step)
        writer.flush()

    return mark


def mlflow_mark(mlflow: Any) -> Mark:
    """Marks on the curves of MLflow.

    Args:
        mlflow: the module, with a run that is active, or a client bound to one.

    Returns:
        What `Marks` calls with each `Incident`.
    """

    def mark(incident: Incident) -> None:
        if incident.lost_steps is not None:
            mlflow.log_metric("keepstep/lost_steps", incident.lost_steps, step=incident.step)
        mlflow.set_tag(f"keepstep.incident.{incident.step}", incident.text)

    return mark
