"""Prediction: what a simulated job makes of a real one's faults, set against what the real one did.

Comes in: a `Record` of a drill. Goes out: for each moment in which all resumed, seen and predicted
side by side, and their sums. Every seed is the same schedule with other chances: how long each part
of a step takes is drawn anew from what was measured.

Invariant: nothing here knows what was seen before it has been predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.prediction.drawn import Drawn, Resumption, source_of
from benchmarks.prediction.measured_plan import Course
from benchmarks.prediction.schedule import Striker
from keepstep.model.units import S_NS
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.world.world import World

MOST_NS = 3600 * S_NS


@dataclass(frozen=True, slots=True)
class Run:
    """One seed's. `wrong`: what went wrong in the simulation itself. `overdue`: strikes whose
    moment did not come."""

    resumptions: tuple[Resumption, ...]
    overdue: int
    wrong: str


@dataclass(frozen=True)
class Row:
    """Of one moment: `what` had struck since the one before. Counts are of seeds; a seed without a
    resumption here counts as (none, 0)."""

    what: str
    seen: tuple[str, int] | None
    predicted: Counter[tuple[str, int]]

    @property
    def agrees(self) -> bool:
        """What was seen is what some seed predicts."""
        return (self.seen or NOTHING) in self.predicted


@dataclass(frozen=True)
class Sums:
    """Of a whole run: of what was seen, and of each seed."""

    seen: int
    predicted: tuple[int, ...]

    @property
    def agrees(self) -> bool:
        return min(self.predicted) <= self.seen <= max(self.predicted)


@dataclass(frozen=True)
class Comparison:
    rows: tuple[Row, ...]
    resumptions: Sums
    lost_steps: Sums
    by_source: dict[str, Sums]
    wrong: tuple[str, ...]
    overdue: int

    @property
    def agrees(self) -> bool:
        return (
            all(row.agrees for row in self.rows)
            and self.resumptions.agrees
            and self.lost_steps.agrees
            and not self.wrong
        )


NOTHING = ("none", 0)


def predict(drawn: Drawn, seed: int) -> Run:
    """The same strikes, in a simulated job with other chances."""
    course = Course()
    job = SimJob(replace(drawn.plan, course=course), World(seed))
    striker = Striker(job, course, drawn.strikes, drawn.settled)
    job.watch([striker])
    job.begin()
    job.world.run(MOST_NS)
    resumptions = tuple(
        Resumption(
            strikes=found.strikes,
            step=found.step,
            source=source_of(drawn.policy, found.source, found.fetched),
            lost_steps=found.lost_steps,
        )
        for found in striker.resumptions
    )
    wrong = "; ".join(job.violations)
    if not job.world.stopped:
        wrong = f"it has not come to the end of its {len(drawn.strikes)} strikes"
    return Run(resumptions[1:], striker.overdue, wrong)


def compare(
    drawn: Drawn, seeds: Iterable[int], tell: Callable[[], None] = lambda: None
) -> Comparison:
    runs = []
    for seed in seeds:
        runs.append(predict(drawn, seed))
        tell()
    return set_against(drawn, runs)


def set_against(drawn: Drawn, runs: Sequence[Run]) -> Comparison:
    seen = _by_moment(drawn.seen)
    predicted = [_by_moment(run.resumptions) for run in runs]
    moments = sorted({m for found in (seen, *predicted) for m in found})
    rows, before = [], 0
    for moment in moments:
        what = " + ".join(s.kind for s in drawn.strikes[before : moment[0]]) or "again"
        rows.append(Row(what, seen.get(moment), Counter(p.get(moment, NOTHING) for p in predicted)))
        before = moment[0] if moment in seen else before
    sources = sorted(
        {r.source for found in (drawn.seen, *(run.resumptions for run in runs)) for r in found}
    )

    def sums(of: Callable[[Sequence[Resumption]], int]) -> Sums:
        return Sums(of(drawn.seen), tuple(of(run.resumptions) for run in runs))

    return Comparison(
        tuple(rows),
        sums(len),
        sums(lambda found: sum(r.lost_steps for r in found)),
        {
            source: sums(lambda found, source=source: sum(r.source == source for r in found))  # type: ignore[misc]
            for source in sources
        },
        tuple(run.wrong for run in runs if run.wrong),
        sum(run.overdue for run in runs),
    )


def _by_moment(found: Sequence[Resumption]) -> dict[tuple[int, int], tuple[str, int]]:
    """By how many strikes there had been, and the how manieth resumption since the last of them."""
    told: dict[tuple[int, int], tuple[str, int]] = {}
    counts: Counter[int] = Counter()
    for r in found:
        told[r.strikes, counts[r.strikes]] = (r.source, r.lost_steps)
        counts[r.strikes] += 1
    return told
