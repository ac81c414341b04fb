"""Absence: the time in which a job was not started, as its journal tells it. Nobody recovers then.

Comes in: events, in the order of time. Goes out: an `Away` when a launch has ended an absence.
Reads no clock and no file.

An absence begins when no rank is left and nobody is there who would start one: without an agent
with the last rank, with agents at their last word about the job (`job-ended`). An agent that was
killed says no last word: where another launch follows it, and no agent that takes over from it at
once (`takes_over`), the absence began with the last rank, too. An absence ends with the first word
of the launch that follows: `keeper-started`, `job-started` or `rank-joined`. Ranks whose launch has
trained before (`goes_on` of `rank-joined`) were started again by a launcher such as torchrun: that
is a way back, and no absence.

Invariant: while one of keepstep's agents looks after the job, nobody is away.
"""

from __future__ import annotations

from typing import NamedTuple

from keepstep.model.events import Event


class Away(NamedTuple):
    """`since`: the last sign of life. `until`: the first word of the launch that followed."""

    since: Event
    until: Event


class Absence:
    """Of one job; `hear` every event."""

    def __init__(self) -> None:
        self.since: Event | None = None  # nobody is there since; a launcher may still come back
        self._opened: Event | None = None
        self._ranks = set[object]()
        self._has_agent = False
        self._last_left: Event | None = None  # with it no rank was left

    def hear(self, event: Event) -> Away | None:
        """What has ended with this event."""
        kind, told = event.kind, event.data.get("rank")
        rank = told if isinstance(told, int) else None
        if kind in ("keeper-started", "job-started") and self.since is not None:
            self._opened = self._opened or event
        if kind == "job-started":
            takes_over = event.data.get("takes_over") is True
            if self._has_agent and not self._ranks and not takes_over and self.since is None:
                self.since = self._last_left  # its agent is gone without a word
            self._has_agent, self._last_left = True, None
            return self._over(event)
        if kind in ("rank-joined", "rank-attached"):
            self._ranks.add(rank)
            self._last_left = None
            goes_on = kind == "rank-attached" or event.data.get("goes_on") is True
            return self._over(None if goes_on else event)
        if kind == "job-ended":
            self._has_agent = False
        elif kind == "rank-left" and rank in self._ranks:
            self._ranks.discard(rank)
            self._last_left = None if self._ranks else event
        else:
            return None
        if not self._has_agent and not self._ranks and self.since is None:
            self.since = event
        return None

    def _over(self, launch: Event | None) -> Away | None:
        since, until = self.since, self._opened or launch
        self.since = self._opened = None
        return Away(since, until) if since is not None and launch and until else None
