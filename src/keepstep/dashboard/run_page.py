"""Run page: one run of a job as the page shows it: its outline over time, its recoveries as
waterfalls, its log, what calls for a look.

Comes in: a `JobRun`. Goes out: a plain document. Pure.

Times: `begun_ms` since 1970; everything else in milliseconds since the run began, on one line of
time for all nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from keepstep.core.economics.goodput import Axis
from keepstep.core.economics.journal_kinds import BACK, number
from keepstep.dashboard.lives import RankLife, lives_of
from keepstep.dashboard.sentences import (
    ScreenLine,
    lines,
    recovery_title,
    remarks,
    run_end,
    run_outcome,
    stage_words,
)
from keepstep.dashboard.timeline import TROUBLE, JobRun, RecoveryChain
from keepstep.model.decoding import on_a_screen
from keepstep.model.events import KINDS, Event
from keepstep.model.units import MS_NS

# What a page carries; the journal has everything.
MAX_RECOVERIES = 200
MAX_LINES = 300
MAX_POINTS = 600
MAX_CHARACTERS = 2000
STEPS = BACK | {"next-step", "persisted"}
# Signs of trouble that are parts of an incident, which has a chain of its own.
OF_INCIDENTS = {"diagnosis", "keeper-lost", "lost-notice", "recurrence", "suspicion"}

Place = Callable[[Event], int]


def run_page(number_: int, run: JobRun) -> dict[str, Any]:
    """The `number_`th run of its job."""
    place = _placed(run.events)
    told = list(lines(run.events))
    return {
        **run_outline(number_, run),
        "length_ms": max(map(place, run.events)),
        "is_over": run.end is not None,
        "steps": _thinned([[place(e), s] for e in run.events if (s := _step(e)) is not None]),
        "checkpoints": _thinned([[place(e), _step(e)] for e in run.events if _is_stored(e)]),
        "recoveries": _recoveries(run, place),
        "earlier_recoveries": max(0, len(run.recoveries) - MAX_RECOVERIES),
        "troubles": _troubles(run.events, place),
        "ranks": {str(life.rank): _life(life) for life in lives_of(run.events).values()},
        "log": log_lines(told, place, len(told)),
        "log_lines": len(told),
    }


def run_outline(number_: int, run: JobRun) -> dict[str, Any]:
    """A run in a line, to choose it by."""
    end = run_end(run)
    return {
        "number": number_,
        "begun_ms": run.events[0].wall_ns // MS_NS,
        "outcome": run_outcome(run),
        "end": {"text": shown(end.text), "tone": end.tone},
    }


def run_log(run: JobRun, before: int) -> dict[str, Any]:
    """The lines of a run's log before that one, as many as a page carries."""
    return log_lines(list(lines(run.events)), _placed(run.events), before)


def log_lines(told: Sequence[ScreenLine], place: Place, end: int) -> dict[str, Any]:
    """The last lines before `end`, by their number."""
    first = max(0, min(end, len(told)) - MAX_LINES)
    return {
        str(index): {
            "at_ms": place(line.event),
            "who": shown(line.who),
            "kind": line.event.kind,
            "why": shown(line.why),
            "tone": line.tone,
        }
        for index, line in enumerate(told[first:end], first)
    }


def shown(text: str) -> str:
    """What a program, another machine or a log may have said, as far as a page carries it."""
    return on_a_screen(text[:MAX_CHARACTERS])


def _placed(events: Sequence[Event]) -> Place:
    """Milliseconds since the run began. Never negative."""
    axis = Axis()
    first_ns = axis.place(events[0].wall_ns, events[0].mono_ns, events[0].boot)

    def place(event: Event) -> int:
        at_ns = axis.place(event.wall_ns, event.mono_ns, event.boot)
        return max(0, at_ns - first_ns) // MS_NS

    return place


def _step(event: Event) -> int | None:
    """Which step was done then."""
    if event.kind in STEPS:
        return number(event.data.get("step"))
    return number(event.data.get("completed_step")) if event.kind == "rank-left" else None


def _is_stored(event: Event) -> bool:
    return event.kind == "persisted" and _step(event) is not None


def _thinned(points: list[list[Any]]) -> list[list[Any]]:
    """At most MAX_POINTS of them, the first and the last among them."""
    over = len(points) - 1
    if over < MAX_POINTS:
        return points
    return [points[index * over // (MAX_POINTS - 1)] for index in range(MAX_POINTS)]


def _recoveries(run: JobRun, place: Place) -> dict[str, Any]:
    first = max(0, len(run.recoveries) - MAX_RECOVERIES)
    return {
        str(index): _recovery(index, chain, place)
        for index, chain in enumerate(run.recoveries[first:], first + 1)
    }


def _recovery(index: int, chain: RecoveryChain, place: Place) -> dict[str, Any]:
    title = recovery_title(index, chain)
    begun_ms = place(chain.stages[0].event) if chain.stages else 0
    stages = []
    for stage in chain.stages:
        words = stage_words(stage, MAX_CHARACTERS)
        stages.append(
            {
                "link": stage.link,
                "name": shown(stage.name),
                "at_ms": place(stage.event) - begun_ms,
                "took_us": stage.took_ns // 1000,
                "why": shown(words.text),
                "tone": words.tone,
            }
        )
    return {
        "title": shown(title.text),
        "tone": title.tone,
        "outcome": chain.outcome,
        "at_ms": begun_ms,
        "took_ms": chain.took_ns // MS_NS,
        "away_ms": chain.away_ns // MS_NS,
        "stages": stages,
        "remarks": [[label, shown(why)] for label, why in remarks(chain)],
    }


def _troubles(events: Sequence[Event], place: Place) -> dict[str, Any]:
    """By kind, what went wrong beside the incidents: how often, and how it was told last."""
    found = [e for e in events if e.kind in TROUBLE - OF_INCIDENTS]
    counts = Counter(event.kind for event in found)
    last = {event.kind: event for event in found}
    return {
        kind: {
            "what": KINDS.get(kind, kind),
            "times": counts[kind],
            "last_ms": place(event),
            "why": shown(event.why),
        }
        for kind, event in sorted(last.items())
    }


def _life(life: RankLife) -> dict[str, Any]:
    return {
        "lives": life.lives,
        "pid": life.pid,
        "step": life.step,
        "state": life.state,
        "why": shown(life.why),
    }
