"""Phases: what the rank does now, passed on to whoever listens in this process.

Comes in: announcements of the rank, from any thread. Goes out: calls of the listeners, in the order
in which they were added, and a word to the driver when what it waits for may have come. Decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keepstep.model.snapshot import Phase

Listener = Callable[[Phase, int], None]


class Phases:
    """See `world.Trainer`."""

    def __init__(self, listeners: Sequence[Listener], notify: Callable[[], None]) -> None:
        self._listeners = list(listeners)
        self._notify = notify

    def announce(self, phase: Phase, step: int) -> None:
        for listener in self._listeners:
            listener(phase, step)

    def changed(self) -> None:
        self._notify()
