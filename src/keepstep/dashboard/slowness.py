"""Slowness: which ranks of this node are slow now, and what nobody can tell of that or of hangs.

Comes in: the node's journal, when its agent last said that it lives, the time. Goes out: rows.

Invariant: where nobody looks there is a row that says so: no rows means that all are well.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keepstep.core.detection.links_now import LinksNow
from keepstep.core.detection.slow_now import SlowNow
from keepstep.dashboard.ages import human_age
from keepstep.dashboard.moment import Moment
from keepstep.edge.shm.beat_files import read_agent_beat
from keepstep.edge.shm.keeper_look import KeeperLook
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.beats import SILENT_NS
from keepstep.model.events import Event

SILENT = "slow ranks and hangs"  # what nobody looks for where the agent is silent
KEEPER = "the keeper"
LINKS = "slow links"
LOUD = ("silence", "unheard", "blind")  # doubts that do not pass by themselves


@dataclass(frozen=True, slots=True)
class SlowRow:
    """A slow rank, as its agent has told (core/detection/stragglers.py). `why`: in a line;
    `detail`: with all numbers and what else could be done. `section`, `cause` and `detail` are
    empty where it has not said them. `confirmed`: what fixed work has found of its processor
    (core/detection/reference.py), `confirmed_why` in a sentence; empty where it has not. Of a
    processor that is throttled that is the cause, too."""

    rank: int
    section: str
    cause: str
    why: str
    age_ns: int
    confirmed: str = ""
    confirmed_why: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DoubtRow:
    """Something that nobody can tell. `of`: of what. `doubt`: the word of
    core/detection/slow_doubts.py or links_now.py, `silence` where agent or keeper is silent.
    `age_ns`: since that was told, or since who is silent last said anything; None: not in this life
    of the machine."""

    of: str
    doubt: str
    why: str
    age_ns: int | None


def slow_rows(known: SlowNow, now: Moment) -> tuple[SlowRow, ...]:
    """The slow ranks, in their order."""
    confirmed = known.confirmed()
    return tuple(
        _slow_row(rank, event, confirmed.get(rank), now) for rank, event in known.by_rank().items()
    )


def _slow_row(rank: int, event: Event, confirmed: Event | None, now: Moment) -> SlowRow:
    said = "" if confirmed is None else str(confirmed.data.get("cause", ""))
    cause = said if said == "throttled" else str(event.data.get("cause", ""))
    return SlowRow(
        rank,
        str(event.data.get("section", "")),
        cause,
        event.why,
        max(0, now.wall_ns - event.wall_ns),
        said,
        confirmed.why if confirmed is not None else "",
        str(event.data.get("detail", "")),
    )


def doubt_rows(known: SlowNow, now: Moment) -> tuple[DoubtRow, ...]:
    """Why it cannot be told of some rank whether it is slow."""
    return tuple(
        DoubtRow(
            "slow ranks",
            str(event.data.get("doubt", "")),
            event.why,
            max(0, now.wall_ns - event.wall_ns),
        )
        for event in known.doubts()
    )


def silence_rows(job_dir: Path, now: Moment) -> tuple[DoubtRow, ...]:
    """That this node's agent is silent. Nothing where none has said anything yet: the job has just
    begun, or another launcher than `keepstep run` started it."""
    beat = read_agent_beat(MEMORY, job_dir)
    if beat is None:
        return ()
    said = f"the agent of node {beat.node} has said nothing"
    if beat.boot != now.boot:
        return (DoubtRow(SILENT, "silence", f"{said} since this machine started", None),)
    age_ns = max(0, now.mono_ns - beat.at_ns)
    return (DoubtRow(SILENT, "silence", said, age_ns),) if age_ns > SILENT_NS else ()


def link_doubt_rows(links: LinksNow, keeper: KeeperLook, now: Moment) -> tuple[DoubtRow, ...]:
    """Why it cannot be told of some link whether it is slow. Where the keeper that compares them is
    silent or gone, what it has told is no news of now."""
    if links.is_silent(keeper.alive):
        why = "this node's keeper, which compares them, has said nothing"
        return (DoubtRow(LINKS, "silence", why, keeper.silent_ns),)
    return tuple(
        DoubtRow(LINKS, told.doubt, told.why, max(0, now.wall_ns - told.event.wall_ns))
        for told in links.doubts()
    )


def keeper_rows(keeper: KeeperLook) -> tuple[DoubtRow, ...]:
    """That this node's keeper holds its lock and is silent: stopped, or stuck. One that has none
    is not alive, which is no doubt."""
    if keeper.alive is not None:
        return ()
    if keeper.silent_ns is None:
        return (DoubtRow(KEEPER, "silence", "it holds its lock and has said nothing yet", None),)
    why = f"process {keeper.pid} holds its lock and has said nothing"
    return (DoubtRow(KEEPER, "silence", why, keeper.silent_ns),)


def doubt_words(row: DoubtRow) -> str:
    """A row as a person reads it at this moment."""
    age = human_age(row.age_ns)
    if row.doubt != "silence":
        return f"Unknown, told {age} ago: {row.of}: {row.why}."
    return f"Unknown: {row.of}: {row.why}" + ("." if row.age_ns is None else f" for {age}.")
