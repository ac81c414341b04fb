"""Collective profiles: when a job's ranks leave the network idle within a step, and which copies go
there.

Comes in: the profile pages of the ranks on this node, and what their keeper has written into
`interleave.json`. Goes out: frozen values that a screen can show. Computes the plan anew from the
keeper's figures; never writes, asks no process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.pacing.schedule import Plan, plan_of
from keepstep.core.pacing.step_profile import Profile, Rhythm, intersection
from keepstep.edge.shm.collective_profile_page import (
    PLAN_FILE,
    CollectiveProfileReader,
    profile_path,
    read_word,
)
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import ranks_in
from keepstep.model.rhythm import Told
from keepstep.model.units import human_bytes, human_ns


@dataclass(frozen=True, slots=True)
class RankProfile:
    """When a rank's collectives use the network. `why`: what the profile rests on, or why it is
    None yet."""

    rank: int
    profile: Profile | None
    why: str


@dataclass(frozen=True, slots=True)
class NetworkView:
    """A node's network within a step.

    step_ns: how long a step takes; 0 while no profile is known.
    idle: (begin, end) of the spans that all ranks leave idle, nanoseconds into the step.
    told: what the node's keeper has measured, None before it has. plan: which copies go into the
    idle spans, None before there is one.
    """

    ranks: tuple[RankProfile, ...]
    step_ns: int
    idle: tuple[tuple[int, int], ...]
    told: Told | None
    plan: Plan | None


def network_view(job_dir: Path) -> NetworkView:
    """What the pages of the job's ranks here say; without ranks where none has a page."""
    found = [_rank(job_dir, rank) for rank in ranks_in(MEMORY, job_dir)]
    ranks = tuple(rank for rank in found if rank is not None)
    profiles = [rank.profile for rank in ranks if rank.profile is not None]
    idle = intersection(profiles)
    told = read_word(MEMORY, job_dir / PLAN_FILE, Told)
    return NetworkView(
        ranks=ranks,
        step_ns=max((profile.step_ns for profile in profiles), default=0),
        idle=idle,
        told=told,
        plan=plan_of(told, idle) if told is not None and profiles else None,
    )


def network_words(view: NetworkView) -> Iterator[str]:
    """What the profiles rest on, what the link carries, and when copies go."""
    for rank in view.ranks:
        if rank.profile is not None:
            yield f"rank {rank.rank}: {rank.why}"
            break
    told = view.told
    if told is None:
        yield (
            "The node's keeper has not planned any copies: it has sent none yet, or has not seen "
            "enough steps."
        )
        return
    yield (
        f"Link: {human_ns(told.alpha_ns)} and {human_bytes(told.bytes_per_s)}/s; chunks of at most "
        f"{human_bytes(told.chunk_bytes)}, at most {human_bytes(told.reserve_bytes)} under way."
    )
    if view.plan is not None:
        yield f"Plan: {view.plan.why}."
    if told.open_because:
        yield f"Copies are not interleaved: {told.open_because}."
    else:
        yield "Copies go while the network is idle."
    if told.late:
        yield f"{told.late} blocks waited too long and were sent while it was busy."


def _rank(job_dir: Path, number: int) -> RankProfile | None:
    """None when it has no page."""
    try:
        page = CollectiveProfileReader(MEMORY, profile_path(job_dir, number))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return RankProfile(number, None, str(error))
    rhythm = Rhythm()
    for step in page.steps():
        rhythm.saw(step)
    page.close()
    return RankProfile(number, rhythm.profile, rhythm.why)
