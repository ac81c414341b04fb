"""Persister watch: finds a persister that stands still, as on a store that hangs, and gives it up.

Comes in: whether anybody waits for the persister, how long it has computed, the clock. Goes out: a
word to the operator, and then the persister's end: who waits hears why, the ranks have their slots
back, and the next act starts another one.

A persister at work computes: it hashes what it reads and writes. One that waits for a dead mount or
a silent server does not, however long that takes.
"""

from __future__ import annotations

from keepstep.model.events import WARNING
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Clock, Journal
from keepstep.runtime.keeper.persister_client import PersisterClient

COMPUTES_NS = 10 * MS_NS  # the kernel counts in such pieces; less is waiting and looking
TOLD_NS = 15 * S_NS
GIVEN_UP_NS = 120 * S_NS


class PersisterWatch:
    """Over one keeper's persister."""

    def __init__(self, persister: PersisterClient, clock: Clock, journal: Journal) -> None:
        self._persister, self._clock, self._journal = persister, clock, journal
        # whose process, and what it had computed; None while nobody waits for it
        self._seen: tuple[int | None, int] | None = None
        self._since_ns = 0
        self._is_told = False

    def look(self) -> None:
        """From time to time."""
        client = self._persister
        if not client.is_awaited:
            self._seen = None
            return
        now_ns = self._clock.monotonic_ns()
        pid, computed_ns = client.pid, client.computed_ns
        if self._seen is None or pid != self._seen[0] or computed_ns - self._seen[1] >= COMPUTES_NS:
            self._seen = pid, computed_ns
            self._since_ns = now_ns
            self._is_told = False
            return
        stood_ns = now_ns - self._since_ns
        if stood_ns >= GIVEN_UP_NS:
            why = f"stood still for {GIVEN_UP_NS // S_NS} s and is given up: the store hangs"
            self._journal.record("persister-stuck", f"the persister (process {pid}) {why}", WARNING)
            client.abandon(why)
        elif stood_ns >= TOLD_NS and not self._is_told:
            self._is_told = True
            why = (
                f"the persister (process {pid}) has stood still for {TOLD_NS // S_NS} s: the store "
                f"does not answer. After {GIVEN_UP_NS // S_NS} s it is given up"
            )
            self._journal.record("persister-stuck", why, WARNING)
