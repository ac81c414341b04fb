"""Door: who among those that have connected and not proven themselves yet has to go.

Whoever reaches the port can connect and say nothing. A place at the door costs a thread, so there
are few; but a neighbour that reconnects must always find one. So nobody is turned away: when one
more comes than there are places, somebody goes, the one that came first from where most have come.
A neighbour proves itself within a round trip, and is gone from the door by then.

Invariant: of an address of the mesh so many places are kept (`KEPT`) that strangers from however
many addresses do not put it out. What is beyond that has no right that a stranger has not: somebody
on a neighbour's machine may be the crowd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Generic, TypeVar

T = TypeVar("T")

KEPT = 8  # for each address of the mesh: its channels come one after the other


class Door(Generic[T]):
    """`places`: how many there are. A guest is anything hashable."""

    def __init__(self, places: int) -> None:
        if places < 1:
            raise ValueError(f"places: expected at least 1, found {places}")
        self._places = places
        self._guests: dict[T, str] = {}  # and where they come from; in the order they came

    def __len__(self) -> int:
        return len(self._guests)

    @property
    def is_full(self) -> bool:
        """Whether somebody has to go for the next one."""
        return len(self._guests) >= self._places

    def enter(self, guest: T, source: str, neighbours: AbstractSet[str] = frozenset()) -> T | None:
        """Who has to go for that one, if anybody. `source`: its address, without the port.
        `neighbours`: the addresses of the mesh; they count when the door is full."""
        leaver = self._leaver(source, neighbours) if self.is_full else None
        if leaver is not None:
            del self._guests[leaver]
        self._guests[guest] = source
        return leaver

    def leave(self, guest: T) -> None:
        """It has proven itself, or is gone."""
        self._guests.pop(guest, None)

    def _leaver(self, source: str, neighbours: AbstractSet[str]) -> T:
        crowds = Counter([*self._guests.values(), source])

        def is_kept(each: str) -> bool:
            return each in neighbours and crowds[each] <= KEPT

        may_go = [each for each in self._guests.values() if not is_kept(each)]
        largest = max(crowds[each] for each in may_go or self._guests.values())
        return next(
            guest
            for guest, each in self._guests.items()
            if crowds[each] == largest and not (may_go and is_kept(each))
        )
