"""Suspicion: what one rank holds to be wrong, until all have told each other.

Comes in: the first sign, with the evidence as it was then; what this rank sees where all stand,
which may be some steps later. Goes out: what it tells there. Asks for nothing, and acts on nothing.

Invariant: what it tells is of one step, the first that is not to be trusted, wherever it has
evidence of that one: what is seen later is what came of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from keepstep.model.numbers import Sight, Sign


@dataclass
class Suspicion:
    """`first`: the first step whose end is not to be trusted. `seen`: at the end of a step that was
    looked at; None where only a copy was seen, later. `void`: so many halts have come to nothing;
    `asks`: so often one was asked for."""

    first: int
    seen: Sight | None = None
    void: int = 0
    asks: int = 0

    @property
    def signs(self) -> tuple[Sign, ...]:
        """At the end of a step; none where a copy was seen."""
        return () if self.seen is None else self.seen.signs

    def told_with(self, mine: Sight, leaves_no_trace: Collection[Sign]) -> Sight:
        """`mine`: of the step behind which all stand. What was wrong in an earlier one is so still,
        but for signs that leave nothing behind when the state is finite now."""
        signs = tuple(sign for sign in self.signs if sign not in leaves_no_trace)
        if not (signs or mine.signs):
            return mine
        first, told = min(self.first, mine.first_step), mine
        if self.seen is not None and self.seen.first_step == first:
            told = replace(self.seen, holds=mine.holds, skips=mine.skips)
        signs = tuple(dict.fromkeys((*signs, *mine.signs)))
        return replace(told, signs=signs, first_step=first, means=False)
