"""Lives: what journals tell of each rank, where no page of it can be read: of a run that is over,
and of ranks on other nodes.

Comes in: the events of a run. Goes out: one row for each rank. Pure.

Invariant: what no event says is None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepstep.core.economics.journal_kinds import number
from keepstep.model.events import Event


@dataclass(slots=True)
class RankLife:
    """A rank by what was told of it. `lives`: how many processes it has been. `step`: the newest
    that it is known to have completed. `state`: joined, trained, left or ended."""

    rank: int
    lives: int = 0
    pid: int | None = None
    step: int | None = None
    state: str = "unknown"
    why: str = ""


def lives_of(events: Iterable[Event]) -> dict[int, RankLife]:
    """By rank, in order."""
    lives: dict[int, RankLife] = {}
    for event in events:
        rank = _rank_of(event)
        if rank is None:
            continue
        life = lives.setdefault(rank, RankLife(rank))
        step = number(event.data.get("step"))
        if event.kind == "rank-joined":
            life.lives += 1
            life.pid, life.state, life.why = number(event.data.get("pid")), "joined", event.why
        elif event.kind == "next-step":
            life.state, life.why = "trained", event.why
            life.step = max(step if step is not None else -1, life.step or -1)
        elif event.kind == "rank-left":
            left = number(event.data.get("completed_step"))
            life.step = life.step if left is None else max(left, life.step or -1)
            if life.state != "ended":
                life.state, life.why = "left", event.why
        elif event.kind == "rank-bye":
            life.state, life.why = ("ended" if event.data.get("ok") else "left"), event.why
        elif event.kind == "rank-exited":
            is_well = event.data.get("code") == 0
            life.state, life.why = ("ended" if is_well else "left"), event.why
    return dict(sorted(lives.items()))


def _rank_of(event: Event) -> int | None:
    """Whom the event is about."""
    if event.kind in ("rank-joined", "rank-left", "rank-bye", "rank-exited"):
        return number(event.data.get("rank"))
    if event.kind == "next-step" and event.who.startswith("rank ") and event.who[5:].isdecimal():
        return int(event.who[5:])
    return None
