"""History: a job's runs as its journals grow, without reading all of them again each time.

Comes in: events, in the order in which they were written or, of several journals, by time. Goes
out: the runs as `timeline.runs_of` would have them, and an account of each. Pure.

Invariant: `runs` equals `runs_of` of all events. An event belongs to the last run, may open one, or
tells that the last run continues the one before (it resumed from what that had left): so what is
before these two stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keepstep.core.economics.goodput import Account, Ledger, StepTempo
from keepstep.dashboard.timeline import JobRun, runs_of
from keepstep.model.events import Event

OPEN_RUNS = 2


class History:
    """Of one job."""

    def __init__(self, of_several: bool = False) -> None:
        """`of_several`: nodes' journals, as in `runs_of`."""
        self._of_several = of_several
        self._closed: list[JobRun] = []
        self._open: list[JobRun] = []
        self._ledger: tuple[JobRun, Ledger] | None = None  # of the last run
        self._accounts: dict[int, tuple[JobRun, Account]] = {}  # of runs before, by their place

    @property
    def runs(self) -> list[JobRun]:
        """Every run, the oldest first."""
        return [*self._closed, *self._open]

    def add(self, events: Sequence[Event]) -> None:
        """What was written since."""
        if not events:
            return
        known = [event for run in self._open for event in run.events]
        runs = runs_of(
            by_time([*known, *events]) if self._of_several else [*known, *events],
            self._of_several,
        )
        self._closed += runs[:-OPEN_RUNS]
        self._open = runs[-OPEN_RUNS:]

    def account(
        self, place: int, tempos: Sequence[StepTempo], now: tuple[int, int, str] | None
    ) -> Account:
        """Where the time of the run in that place of `runs` went. `tempos`, `now`: as in
        `goodput.account`, of the last run alone."""
        run = self.runs[place]
        if place < len(self.runs) - 1:
            known = self._accounts.get(place)
            if known is None or known[0] is not run:
                known = self._accounts[place] = run, ledger_of(run.events).account()
            return known[1]
        if self._ledger is None or self._ledger[0] is not run:
            self._ledger = run, ledger_of(run.events)
        ledger = self._ledger[1]
        return ledger.account(tempos, None if now is None else ledger.axis.place(*now))


def ledger_of(events: Iterable[Event]) -> Ledger:
    """An account of events in any order."""
    ledger = Ledger()
    for event in by_time(events, ledger):
        ledger.add(event)
    return ledger


def by_time(events: Iterable[Event], ledger: Ledger | None = None) -> list[Event]:
    """Events of several journals on one line of time."""
    axis = (ledger or Ledger()).axis
    return sorted(events, key=lambda e: axis.place(e.wall_ns, e.mono_ns, e.boot))
