"""Rhythm view: when the network of a job's ranks is idle within a step, and what of the copies goes
where.

Comes in: the rhythm pages of the ranks on this node, and what their keeper has written into
`interleave.json`. Goes out: frozen values a screen can show. Computes the plan anew from the
keeper's figures; never writes, asks nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keepstep.core.pacing.schedule import Plan, plan_of
from keepstep.core.pacing.step_profile import Profile, Rhythm, intersection
from keepstep.edge.shm.collective_profile_page import PLAN_FILE, RhythmReader, read_word
from keepstep.model.rhythm import Told


@dataclass(frozen=True, slots=True)
class RankRhythm:
    """`profile` None: there is none yet, `why` says why."""

    rank: int
    profile: Profile | None
    why: str


@dataclass(frozen=True, slots=True)
class RhythmView:
    """`idle`: (begin, end) of the spans that all ranks leave, nanoseconds into the step; `plan`
    goes into these."""

    ranks: tuple[RankRhythm, ...]
    step_ns: int
    idle: tuple[tuple[int, int], ...]
    told: Told | None
    plan: Plan | None


def rhythm_view(job_dir: Path) -> RhythmView:
    ranks = tuple(_rank(path) for path in sorted(job_dir.glob("rank-*/rhythm")))
    profiles = [rank.profile for rank in ranks if rank.profile is not None]
    idle = intersection(profiles)
    told = read_word(job_dir / PLAN_FILE, Told)
    planned = plan_of(told, idle) if told is not None and profiles else None
    return RhythmView(ranks, max((p.step_ns for p in profiles), default=0), idle, told, planned)


def _rank(path: Path) -> RankRhythm:
    number = int(path.parent.name.partition("-")[2])
    try:
        page = RhythmReader(path)
    except (OSError, ValueError) as error:
        return RankRhythm(number, None, str(error))
    rhythm = Rhythm()
    for step in page.steps():
        rhythm.saw(step)
    page.close()
    return RankRhythm(number, rhythm.profile, rhythm.why)
