"""Finite watch: what of one rank's copies has not been finite since it was restored last, and from
which step on nothing is captured because its numbers are in doubt.

Comes in: each copy that is not finite, doubts, and when all ranks agree that this is meant, or
resume anew. Goes out: the first of them, and a word in the journal. Decides nothing: `doubt.py`
does.
"""

from __future__ import annotations

from keepstep.model.events import INFO, WARNING
from keepstep.model.numbers import NotFinite
from keepstep.model.snapshot import Stamp
from keepstep.model.units import first_names
from keepstep.ports import Journal

TOLD_NAMES = 50


class FiniteWatch:
    """`first`: the first step since the last restore whose captured state was not finite, and what
    of it; None: no such state has been seen yet. `doubted`: the first step in doubt: this rank
    captures nothing meanwhile, so nobody gives up what was captured before."""

    def __init__(self, journal: Journal, rank: int) -> None:
        self._journal, self._rank = journal, rank
        self.first: tuple[int, NotFinite] | None = None
        self.doubted: int | None = None

    def forget(self) -> None:
        """All resume anew, or what was found is meant."""
        self.first = self.doubted = None

    def doubt(self, step: int | None) -> None:
        """The numbers of that step are in doubt; None: there is nothing that can be done."""
        self.doubted = step

    def found(self, stamp: Stamp, bad: NotFinite) -> None:
        """Nobody is to resume from the copy of `stamp`. Told once: what follows is no better."""
        if self.first is not None:
            if self.first[1].may_be_meant and not bad.may_be_meant:
                self.first = (self.first[0], bad)
            return
        self.first = (stamp.step, bad)
        names, told = first_names(bad.names), list(bad.names[:TOLD_NAMES])
        step, rank = stamp.step, self._rank
        if bad.may_be_meant:
            why = (
                f"the snapshot of {stamp} is held back: {names} infinite. The next step that is "
                "looked at says whether the program means that"
            )
            self._journal.record("held-back", why, INFO, step=step, rank=rank, bad=told)
            return
        why = (
            f"the snapshot of {stamp} is condemned, and what follows until a restore: {names} not "
            "finite"
        )
        self._journal.record("condemned", why, WARNING, step=step, rank=rank, bad=told)
