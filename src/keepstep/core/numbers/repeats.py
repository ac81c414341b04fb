"""Repeats: does a step come to the same bits when it is run again here, and if not, how far apart
are its runs?

Comes in: what all ranks saw of several runs of one step in which nothing was wrong. Goes out: how
far two runs of the same state and batch may lie apart and still say the same, in one sentence.
Without such runs, or where they lie far apart, nothing is allowed: then whatever differs leaves a
verdict open.

How far apart two runs' gradients are is estimated from a few sums of them with random signs, the
same signs in each run (Alon, Matias and Szegedy, STOC 1996): the mean square of such sums'
differences is the square of the distance. With so few of them an estimate is off by a factor
of two now and then, so what is allowed lies `MARGIN` above the greatest that was seen.

Invariant: what is allowed is told once, and follows from clean runs alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keepstep.model.numbers import Sight, StepRun
from keepstep.model.units import counted

MARGIN = 8.0
# Of the gradients' own size: where more would have to be allowed, an error hides in it.
WIDEST = 0.05


@dataclass(frozen=True, slots=True)
class Repeats:
    """within: so far apart, as a part of their size, two runs of the same state and batch may be; 0
    for bit for bit. why: one sentence. is_known: whether the runs could tell."""

    within: float
    why: str
    is_known: bool = True

    @property
    def is_exact(self) -> bool:
        return self.is_known and self.within == 0.0


def calibrated(step: int, runs: Sequence[StepRun]) -> Repeats:
    """`runs`: of that step, from one snapshot, each rank in its own place. The same on all ranks,
    which all know the same."""
    times = f"step {step} was run {counted(len(runs), 'time')}"
    by_role: dict[int, list[Sight]] = {}
    for seen in (seen for run in runs for seen in run.seen):
        by_role.setdefault(seen.role, []).append(seen)
    if not all(seen.digest for sights in by_role.values() for seen in sights):
        why = f"{times}, and no rank's own gradients could be told from its peers'"
        return Repeats(0.0, why, is_known=False)
    apart = [role for role, sights in by_role.items() if len({s.digest for s in sights}) > 1]
    if not apart:
        return Repeats(0.0, f"{times}, and all ranks found the same bits each time")
    farthest = max(_farthest(by_role[role]) for role in apart)
    on = f"{times}, and rank {apart[0]}"
    if len(apart) > 1:
        on = f"{times}, and {len(apart)} of {counted(len(by_role), 'rank')}"
    found = f"{on} found other gradients, {farthest:.1e} of their size apart"
    if not MARGIN * farthest <= WIDEST:
        why = (
            f"{found}: more than an error could be told from, so what differs between runs leaves "
            "the verdict unknown"
        )
        return Repeats(0.0, why, is_known=False)
    within = MARGIN * farthest
    why = f"{found}: runs that are up to {within:.1e} apart say the same from now on"
    return Repeats(within, why)


def distance(one: Sight, other: Sight) -> float:
    """Of their gradients, as a part of their size; infinity where that is not known."""
    if one.digest == other.digest:
        return 0.0
    if not one.sketch or len(one.sketch) != len(other.sketch):
        return math.inf
    apart = math.dist(one.sketch, other.sketch)
    size = max(math.hypot(*one.sketch), math.hypot(*other.sketch))
    if not math.isfinite(apart) or size == 0.0:
        return math.inf
    return apart / size


def _farthest(sights: Iterable[Sight]) -> float:
    """Digests that differ with equal sums are as near as sums can tell, and not equal."""
    first, *others = sights
    return max(max(distance(first, other) for other in others), 1e-12)
