"""Worked off: in place of a thread that sets an event. Who waits for it does that thread's work."""

from __future__ import annotations

from collections.abc import Callable


class WorkedOff:
    """As far as a copy asks of a `threading.Event`. `advance`: a piece of the work is done."""

    def __init__(self, advance: Callable[[], object]) -> None:
        self._advance = advance
        self._is_over = False

    def set(self) -> None:
        self._is_over = True

    def is_set(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        while not self._is_over:
            self._advance()
