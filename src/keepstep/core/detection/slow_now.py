"""Slow now: who is slow, as a node's journal tells.

Comes in: events, in their order. Goes out: for each rank that is slow the event that says so, and
the one that says what fixed work found there; and why nobody can tell of some rank.

Invariant: a rank is slow from `slow-rank` on until `slow-over`, and nobody is in a run that has
just begun or is over. What fixed work found counts for the word about the rank that it follows.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.model.events import Event

FRESH = ("job-started", "job-ended")


class SlowNow:
    """What was told until now."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._told: dict[int, Event] = {}
        self._confirmed: dict[int, Event] = {}
        self._doubts: dict[str, Event] = {}
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        rank = event.data.get("rank")
        if event.kind in FRESH:
            self._told.clear()
            self._confirmed.clear()
            self._doubts.clear()
        elif event.kind in ("slow-unknown", "slow-known"):
            doubt = str(event.data.get("doubt", ""))
            self._doubts.pop(doubt, None)
            if event.kind == "slow-unknown":
                self._doubts[doubt] = event
        elif isinstance(rank, int) and event.kind in ("slow-rank", "slow-over"):
            self._told.pop(rank, None)
            self._confirmed.pop(rank, None)
            if event.kind == "slow-rank":
                self._told[rank] = event
        elif isinstance(rank, int) and event.kind == "slow-confirmed" and rank in self._told:
            self._confirmed[rank] = event

    def by_rank(self) -> dict[int, Event]:
        return dict(sorted(self._told.items()))

    def confirmed(self) -> dict[int, Event]:
        """What fixed work found, by slow rank."""
        return dict(self._confirmed)

    def doubts(self) -> list[Event]:
        """Why it cannot be told of some rank whether it is slow."""
        return list(self._doubts.values())

    def excess_ratios(self) -> dict[int, float]:
        """Of a step, by rank."""
        found = {}
        for rank, event in self.by_rank().items():
            ratio = event.data.get("excess_ratio")
            found[rank] = float(ratio) if isinstance(ratio, (int, float)) else 0.0
        return found
