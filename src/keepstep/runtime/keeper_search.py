"""Keeper search: how a process of a node finds the keeper of its job.

Comes in: a door, at which a keeper may answer. Goes out: a connection to the keeper that lives;
where none does, one is started and asked again; or why there is none.

Invariant: a search never starts a keeper more often than `START_AGAIN_NS` says. Several processes
may start one each: a lock in the job directory lets one live.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.errors import KeepstepError
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Box, Clock, Hearer, KeeperDoor, Timers

FIND_WITHIN_NS = 10 * S_NS
LOOK_AGAIN_NS = 10 * MS_NS
START_AGAIN_NS = 3 * S_NS


class KeeperSearches:
    """See `ports.Keepers`."""

    def __init__(self, door: KeeperDoor, clock: Clock, timers: Timers) -> None:
        self._door = door
        self._clock = clock
        self._timers = timers

    def find(
        self,
        hearer: Hearer,
        found: Callable[[Box], None],
        missing: Callable[[KeepstepError], None],
    ) -> None:
        search = _Search(self._door, self._clock, self._timers, hearer, found, missing)
        self._timers.after(0, search.look)

    def end(self, box: Box) -> None:
        self._door.end(box)


class _Search:
    """For one connection."""

    def __init__(
        self,
        door: KeeperDoor,
        clock: Clock,
        timers: Timers,
        hearer: Hearer,
        found: Callable[[Box], None],
        missing: Callable[[KeepstepError], None],
    ) -> None:
        self._door = door
        self._clock = clock
        self._timers = timers
        self._hearer = hearer
        self._found = found
        self._missing = missing
        self._deadline_ns = clock.monotonic_ns() + FIND_WITHIN_NS
        self._started_ns: int | None = None

    def look(self) -> None:
        box = self._door.connect(self._hearer)
        now_ns = self._clock.monotonic_ns()
        if box is not None:
            self._found(box)
        elif now_ns > self._deadline_ns:
            self._missing(self._door.in_vain(FIND_WITHIN_NS))
        elif self._started_ns is None or now_ns - self._started_ns > START_AGAIN_NS:
            self._started_ns = now_ns
            self._door.start(self._start_tried)
        else:
            self._timers.after(LOOK_AGAIN_NS, self.look)

    def _start_tried(self, error: KeepstepError | None) -> None:
        if error is not None:
            self._missing(error)
        else:
            self._timers.after(LOOK_AGAIN_NS, self.look)
