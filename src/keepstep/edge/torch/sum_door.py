"""Sum door: who has come to the sum of a step before it was closed, decided by all without any of
them being asked.

    a rank comes    -> one added to a number in the store that all share; its place is what it finds
    the need-th one -> waits for whom it has to, and closes: a number so large that whoever comes
                       later finds it

The store answers whatever its users compute meanwhile, and what it adds it adds at once, so each
rank is either within or late, and nobody has to keep still for that (Chen et al. ask a parameter
server). Moves numbers, decides nothing. Invariant: one closes, once; who is within has told its
number.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

FRESH, SITTING, CLOSED = 1, 1 << 20, 1 << 40
MOST_RANKS = SITTING - 1
TOLD_WITHIN = timedelta(seconds=1)  # a rank that has a place tells its number at once


class SumDoor:
    """Of one sum. Each call asks the store, and raises RuntimeError where it does not answer."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._place: int | None = None

    def come(self, rank: int, is_fresh: bool) -> int | None:
        """This rank's place among those with a gradient of the step, from 0. None: it has none, or
        is late."""
        found = self._store.add(self._key, FRESH if is_fresh else SITTING)
        if found >= CLOSED or not is_fresh:
            return None
        self._place = int(found % SITTING) - 1
        self._store.set(f"{self._key}/{self._place}", str(rank))
        return self._place

    def look(self) -> tuple[int, int]:
        """How many have come with a gradient of the step, and how many who sit out."""
        found = self._store.add(self._key, 0)
        return found % SITTING, found // SITTING

    def close(self, is_over: Callable[[], bool]) -> list[int]:
        """The ranks within, sorted. is_over: whether nobody needs to know any more; then empty."""
        count = (self._store.add(self._key, CLOSED) - CLOSED) % SITTING
        keys = [f"{self._key}/{place}" for place in range(count)]
        while not is_over():
            try:
                self._store.wait(keys, TOLD_WITHIN)
            except RuntimeError:
                if not self._store.check([self._key]):  # it does not answer, or has forgotten all
                    raise
                continue
            return sorted(int(self._store.get(key)) for key in keys)
        return []

    def forget(self, is_closer: bool) -> None:
        """When all have come, one after the other: what this rank has told."""
        if self._place is not None:
            self._store.delete_key(f"{self._key}/{self._place}")
        if is_closer:
            self._store.delete_key(self._key)
