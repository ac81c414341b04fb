"""The loop of a real process, as the contracts want it: a test waits for what is to come about, for
a while."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.edge.os.loop import Loop
from keepstep.model.units import S_NS

PATIENCE_NS = 30 * S_NS


class PatientLoop:
    def __init__(self) -> None:
        self.loop = Loop()
        self.loop.after(PATIENCE_NS, self._out_of_patience)

    @staticmethod
    def _out_of_patience() -> None:
        raise AssertionError("it does not come about")

    def until(self, holds: Callable[[], bool]) -> None:
        """Let it run until that is so."""
        self.loop.run(holds)

    def close(self) -> None:
        self.loop.close()
