"""Numbers journal: what a rank tells people of its doubts.

Comes in: what was seen, what is done about it, verdicts. Goes out: lines of the journal. What all
ranks know rank 0 tells for all of them; what is of one rank, that one. Decides nothing but whether
a device's errors are too many to be chance (core/numbers/soft_errors.py).

Errors of devices are counted in the journal itself: what it had when the first one came, and those
since. Each host has its own, so in it stand the errors of all hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from keepstep.core.numbers.inquiry import RunIt, told
from keepstep.core.numbers.repeats import Repeats
from keepstep.core.numbers.soft_errors import SoftError, ageing, records_of
from keepstep.model.events import INFO, WARNING, Event
from keepstep.model.numbers import (
    BatchPlace,
    Culprit,
    Device,
    Lasting,
    Sight,
    StepRun,
    StepVerdict,
)
from keepstep.ports import Journal

SOFT_ERROR = "soft-error"


def _no_past() -> Iterable[Event]:
    return ()


@dataclass(frozen=True, slots=True)
class OwnDevice:
    """device: what this rank computes on; None: nobody said. tells_of_others: its host's journal
    hears of other hosts' errors by this rank. past: what that journal has."""

    device: Device | None = None
    tells_of_others: bool = False
    past: Callable[[], Iterable[Event]] = _no_past


class NumbersJournal:
    """Of one rank."""

    def __init__(self, journal: Journal, number: int, own: OwnDevice) -> None:
        """number: this rank's."""
        self._journal, self._number, self._own = journal, number, own
        self._errors: list[SoftError] | None = None  # of the whole job; None: not looked up yet
        self._has_told_ageing = False  # of this rank's

    @property
    def _tells(self) -> bool:
        """Whether this rank tells what all of them know."""
        return self._number == 0

    def seen(self, step: int, run: StepRun) -> None:
        if self._tells:
            why = f"step {step} has wrong numbers: {told(run)}"
            signs = [[sign.name.lower() for sign in seen.signs] for seen in run.seen]
            self._journal.record("wrong-numbers", why, WARNING, step=step, signs=signs)

    def counts_all_the_same(self, step: int, why: str) -> None:
        if self._tells:
            self._journal.record("wrong-numbers", why, WARNING, step=step)

    def repeats(self, step: int, found: Repeats) -> None:
        """What running a clean step again has shown."""
        if self._tells:
            told = {"step": step, "within": found.within}
            if found.is_exact:
                self._journal.record("repeats", found.why, INFO, **told)
            else:
                self._journal.record("not-repeatable", found.why, WARNING, **told)

    def not_calibrated(self, step: int, why: str) -> None:
        if self._tells:
            told_why = f"whether steps repeat bit for bit here is not known: at step {step}, {why}"
            self._journal.record("repeats", told_why, INFO, step=step)

    def given_up(self, step: int, why: str) -> None:
        told_why = f"numbers of step {step} are left as they are, and later ones as well: {why}"
        self._journal.record("wrong-numbers", told_why, WARNING, step=step, rank=self._number)

    def meant(self, step: int, names: Sequence[str]) -> None:
        why = (
            f"what is not finite in {', '.join(names)} of rank {self._number} is taken for meant: "
            f"gradients of step {step} are finite all the same"
        )
        self._journal.record("meant", why, INFO, step=step, rank=self._number)

    def condemned(self, step: int, names: Sequence[str]) -> None:
        """The state of that step, from which all have resumed."""
        why = (
            f"the state of step {step} is condemned, on rank {self._number} it holds what is not "
            f"finite: {', '.join(names)}"
        )
        self._journal.record(
            "condemned", why, WARNING, step=step, rank=self._number, bad=list(names)
        )

    def run_again(self, step: int, act: RunIt) -> None:
        if self._tells:
            self._journal.record("run-again", act.why, WARNING, step=step, way=act.way.value)

    def run_in_its_own_place(self, step: int, why: str) -> None:
        if self._tells:
            told_place = f"step {step} is run in its own place: {why}"
            self._journal.record("run-again", told_place, WARNING, step=step)

    def skipped(self, step: int, places: Sequence[BatchPlace]) -> None:
        told_places = [str(place) for place in places]
        why = (
            f"rank {self._number} trains on without what step {step} was made of: "
            f"{'; '.join(told_places)}"
        )
        self._journal.record(
            "batch-skipped",
            why,
            WARNING,
            step=step,
            rank=self._number,
            batches=[[p.loader, p.epoch, p.number] for p in places],
        )

    def judged(
        self, step: int, runs: Sequence[StepRun], verdict: StepVerdict, lasting: Lasting | None
    ) -> None:
        is_device = verdict.culprit is Culprit.HARDWARE
        told_lasting = lasting.value if is_device and lasting is not None else ""
        if self._tells:
            self._journal.record(
                "numbers-judged",
                f"step {step}: {verdict.culprit.value}: {verdict.why}",
                WARNING,
                step=step,
                culprit=verdict.culprit.value,
                lasting=told_lasting,
                rank=verdict.rank,
                where=verdict.where,
                runs=len(runs),
                since=step if verdict.since is None else verdict.since,
            )
        if is_device and lasting is Lasting.TRANSIENT and verdict.rank is not None:
            self._count_error(step, verdict.rank, len(runs), runs[-1].seen)

    def replay_erred(self, step: int, names: Sequence[str], device: Device | None) -> None:
        """An error of this rank's device that is in no state."""
        alone = Sight(self._number, self._number, device=device)
        self._count_error(step, self._number, 2, [alone], f" as it made {', '.join(names)} again")

    def _count_error(
        self, step: int, rank: int, runs: int, seen: Sequence[Sight], how: str = ""
    ) -> None:
        devices = {sight.rank: sight.device for sight in seen}
        names = {number: _name(number, device) for number, device in devices.items()}
        if self._errors is None:
            self._errors = list(_soft_errors(self._own.past()))
        self._errors.append(SoftError(names[rank], step))
        mine, its = self._own.device, devices[rank]
        is_elsewhere = mine is not None and its is not None and its.host != mine.host
        if rank == self._number or (is_elsewhere and self._own.tells_of_others):
            why = f"{names[rank]} computed step {step} wrong{how}, and right after {runs} runs"
            host = "" if its is None else its.host
            told = {"rank": rank, "runs": runs, "device": names[rank], "host": host}
            self._journal.record(SOFT_ERROR, why, WARNING, step=step, **told)
        if rank != self._number or self._has_told_ageing:
            return
        for found in ageing(records_of(self._errors, set(names.values()), step)):
            if found.device == names[rank]:
                self._has_told_ageing = True
                self._journal.record("device-ageing", found.why, WARNING, rank=rank)


def _name(rank: int, device: Device | None) -> str:
    """For people; and for the next life of this rank, which finds it in the journal."""
    return f"the device of rank {rank}" if device is None else str(device)


def _soft_errors(events: Iterable[Event]) -> Iterable[SoftError]:
    """Those that say of which device they are."""
    for event in events:
        if event.kind == SOFT_ERROR:
            device, step = event.data.get("device"), event.data.get("step")
            if isinstance(device, str) and isinstance(step, int):
                yield SoftError(device, step)
