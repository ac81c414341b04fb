"""Swap price: what it costs to have a node leave its place to a spare, as this run has measured it.

Comes in: how long its ranks took to start, to start anew from memory, and to find together again.
Goes out: one price, and the words that say where it is from.

A swap is a restart of all ranks: what restarts took counts, once there was one. Before that it is
what it takes at least: the longest that a rank has taken to start and to have its state, or ranks
to find together when one was lost. Where nothing was measured it is assumed.

To leave a place and to meet takes seconds, whatever the ranks take then: no swap costs less than
`LEAST_NS`. Longer waits of nodes for each other are in no price: a spare is there already.

Invariant: a price that is assumed says so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from keepstep.model.units import S_NS, counted

KEPT = 5  # what a restart took long ago says little: the state may have grown
ASSUMED_NS = 60 * S_NS
LEAST_NS = 10 * S_NS


@dataclass(frozen=True, slots=True)
class SwapPrice:
    """source: for a sentence, in brackets."""

    ns: int
    source: str


ASSUMED = SwapPrice(ASSUMED_NS, "assumed: this run has measured none")


class SwapCosts:
    """What one node's ranks took."""

    def __init__(self) -> None:
        self._anew: deque[int] = deque(maxlen=KEPT)
        self._together: deque[int] = deque(maxlen=KEPT)
        self._longest_start_ns = 0

    def started(self, took_ns: int) -> None:
        """A rank: from its process's beginning until it had its state."""
        self._longest_start_ns = max(self._longest_start_ns, took_ns)

    def restarted(self, took_ns: int) -> None:
        """All ranks were ended, started and had their state, not counting the wait for others."""
        self._anew.append(took_ns)

    def regrouped(self, took_ns: int) -> None:
        """One was lost, and all trained on, the others in their process."""
        self._together.append(took_ns)

    @property
    def longest_start_ns(self) -> int:
        """0: none has been seen."""
        return self._longest_start_ns

    @property
    def price(self) -> SwapPrice:
        """Of a swap now."""
        measured = self._measured
        if measured.ns >= LEAST_NS:
            return measured
        return SwapPrice(LEAST_NS, "at least: nodes leave and meet in that time")

    @property
    def _measured(self) -> SwapPrice:
        if self._anew:
            restarts = counted(len(self._anew), "restart")
            middle = " in the middle" if len(self._anew) > 1 else ""
            return SwapPrice(int(median(self._anew)), f"measured: {restarts} of this run{middle}")
        together_ns = max(self._together, default=0)
        if together_ns > self._longest_start_ns:
            source = "measured: to find together again took that; no restart of all was seen"
            return SwapPrice(together_ns, source)
        if self._longest_start_ns:
            source = "measured: its ranks took that to start; no restart of all was seen"
            return SwapPrice(self._longest_start_ns, source)
        return ASSUMED
