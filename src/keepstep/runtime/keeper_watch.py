"""Keeper watch: finds a keeper that does not answer, as a stopped one, and ends it.

Comes in: over which connection something is waited for, every sign of life, a timer. Goes out: a
question that a keeper answers at once, whatever else it is busy with; and after long silence a
warning and the keeper's end. What follows is what follows any dead keeper.

Time is counted in looks of this process's own: while it was stopped itself, alone or with its
keeper, it has not looked, and gives nobody up.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.model.events import WARNING
from keepstep.model.messages.keeper_rank import AreYouThere
from keepstep.model.units import S_NS
from keepstep.ports import Box, Journal, Keepers, Timers

LOOK_NS = 1 * S_NS
ASKED_AFTER_LOOKS = 5
GIVEN_UP_AFTER_LOOKS = 30


class KeeperWatch:
    """One process's, over the keeper of its node. `awaited`: the connection over which something is
    waited for; None while nothing is."""

    def __init__(
        self, timers: Timers, journal: Journal, keepers: Keepers, awaited: Callable[[], Box | None]
    ) -> None:
        self._timers, self._journal, self._keepers = timers, journal, keepers
        self._awaited = awaited
        self._box: Box | None = None  # that is looked at
        self._looks = 0  # since the keeper was heard last
        self._is_looking = False
        self.times_heard = 0

    @property
    def is_silent(self) -> bool:
        """Whether the keeper has been asked and has not answered."""
        return self._is_looking and self._looks > ASKED_AFTER_LOOKS

    def begin(self) -> None:
        """The keeper has been asked for something. Ends by itself when nothing is waited for."""
        box = self._awaited()
        if box is not self._box or not self._is_looking:
            self._box = box
            self._looks = 0
        if not self._is_looking:
            self._is_looking = True
            self._timers.after(LOOK_NS, self._look)

    def heard(self) -> None:
        """The keeper has said something."""
        self._looks = 0
        self.times_heard += 1

    def ask(self) -> None:
        """Have the keeper say that it is there."""
        self.begin()
        if self._box is not None:
            self._box.send(AreYouThere())

    def _look(self) -> None:
        box = self._awaited()
        if box is None:
            self._is_looking = False
            return
        self._looks = self._looks + 1 if box is self._box else 1
        self._box = box
        self._timers.after(LOOK_NS, self._look)
        if self._looks % GIVEN_UP_AFTER_LOOKS == 0:
            self._give_up(box)
        elif self._looks % ASKED_AFTER_LOOKS == 0:
            box.send(AreYouThere())

    def _give_up(self, box: Box) -> None:
        silent_s = GIVEN_UP_AFTER_LOOKS * LOOK_NS // S_NS
        why = (
            f"the keeper (process {box.pid}) has not answered for {silent_s} s and is ended: it "
            "was stopped, or hangs; the next one adopts the memory"
        )
        self._journal.record("keeper-stuck", why, WARNING, pid=box.pid)
        self._keepers.end(box)
