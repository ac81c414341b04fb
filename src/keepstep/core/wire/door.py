"""Door: who among those that have connected and not proven themselves yet has to go.

Whoever reaches the port can connect and say nothing. A place at the door costs a thread, so there
are few; but a neighbour that reconnects must always find one. So nobody is turned away: when one
more comes than there are places, somebody goes, the one that came first from where most have come.
A neighbour proves itself within a round trip, and is gone from the door by then.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

T = TypeVar("T")


class Door(Generic[T]):
    """`places`: how many there are. A guest is anything hashable."""

    def __init__(self, places: int) -> None:
        if places < 1:
            raise ValueError(f"places: expected at least 1, found {places}")
        self._places = places
        self._guests: dict[T, str] = {}  # and where they come from; in the order they came

    def __len__(self) -> int:
        return len(self._guests)

    def enter(self, guest: T, source: str) -> T | None:
        """Who has to go for that one, if anybody. `source`: its address, without the port."""
        leaver = self._leaver(source) if len(self._guests) >= self._places else None
        if leaver is not None:
            del self._guests[leaver]
        self._guests[guest] = source
        return leaver

    def leave(self, guest: T) -> None:
        """It has proven itself, or is gone."""
        self._guests.pop(guest, None)

    def _leaver(self, source: str) -> T:
        crowds = Counter([*self._guests.values(), source])
        largest = max(crowds[each] for each in self._guests.values())
        return next(guest for guest, each in self._guests.items() if crowds[each] == largest)
