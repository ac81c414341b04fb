"""Timers: `ports.Timers` of one simulated process, by its machine's clock.

A timer dies with its process.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.sim.protocol.world import Process


class SimTimer:
    """See `ports.Timer`."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    def come(self) -> None:
        """It is due."""
        call, self._call = self._call, None
        if call is not None:
            call()


class SimTimers:
    """See `ports.Timers`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def after(self, delay_ns: int, call: Callable[[], None]) -> SimTimer:
        """See `ports.Timers`."""
        timer = SimTimer(call)
        clock = self._process.machine.clock
        self._process.after(clock.takes_ns(max(0, delay_ns)), timer.come)
        return timer
