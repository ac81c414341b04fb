"""The screen of `keepstep explain`: a run's failures link by link, then every event.

Comes in: a `JobRun`. Goes out: rich renderables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keepstep.dashboard.terminal import clock, count, table
from keepstep.dashboard.timeline import (
    GOOD_NEWS,
    JobRun,
    RecoveryChain,
    TimelineStage,
    between_ns,
    is_trouble,
)
from keepstep.model.events import Event
from keepstep.model.units import S_NS, human_ns

LINK_COLOURS = {
    "fact": "red",
    "suspicion": "yellow",
    "diagnosis": "red",
    "refused": "dim",
    "closed": "green",
}
# A failure is to fit on a screen.
MAX_SENTENCES = 4
MAX_SENTENCE_CHARACTERS = 200


def run_screen(job: str, number: int, runs: int, run: JobRun) -> RenderableType:
    """One run, the `number`th of `runs`: its recoveries, then every event."""
    recoveries = (
        _recovery(index, recovery, run) for index, recovery in enumerate(run.recoveries, 1)
    )
    return Group(_title(job, number, runs, run), *recoveries, _timeline(run))


def _title(job: str, number: int, runs: int, run: JobRun) -> Text:
    end = ("still running", "green")
    if run.end is not None:
        end = (f"over: {run.end}", "green" if run.ended_well else "red")
    outcome = "no failure"
    if run.recoveries:
        recovered = sum(recovery.outcome == "resumed" for recovery in run.recoveries)
        failures = count(len(run.recoveries), "failure")
        outcome = f"{failures}, {recovered} recovered, {_lost(run.lost_steps)}"
    begun = clock(run.events[0].wall_ns)
    words = f"  run {number} of {runs}, begun {begun}: {outcome}; "
    return Text.assemble((job, "bold"), words, end)


def _recovery(number: int, recovery: RecoveryChain, run: JobRun) -> RenderableType:
    took = human_ns(recovery.took_ns)
    if recovery.outcome == "resumed":
        source = f"step {recovery.step} from {recovery.source}"
        if recovery.source == "fresh":
            source = "a fresh start"
        title = Text(
            f"Recovery {number}: resumed with {source} in {took}, "
            f"{_lost(recovery.lost_steps or 0)}",
            style="bold green",
        )
    elif recovery.outcome == "ended":
        title = Text(f"Failure {number}: the job ended {took} later", style="bold red")
    else:
        title = Text(f"Failure {number}: not recovered yet", style="bold yellow")
    return Group("", title, chain(recovery, run.events[0]))


def chain(recovery: RecoveryChain, began: Event | None) -> RenderableType:
    """Link by link: at which time since `began`, how long after the link before, and why."""
    made = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for justify in ("left", "left", "right", "right"):
        made.add_column(justify=justify, no_wrap=True)
    made.add_column(overflow="fold")
    before = ""
    for stage in recovery.stages:
        link = "" if stage.link == before else stage.link
        before = stage.link
        at = "" if began is None else f"at {_seconds(between_ns(began, stage.event))}"
        took = f"+{human_ns(stage.took_ns)}"
        made.add_row(Text(link, style="bold"), stage.name, at, took, _stage_words(stage))
    for label, sentences in (
        ("refused", [_short(why) for why in recovery.refused]),
        ("setback", [_short(why) for why in recovery.setbacks]),
        ("evidence", recovery.evidence),
    ):
        for why in sentences[:MAX_SENTENCES]:
            made.add_row(Text(label, style="red"), "", "", "", Text(why, style="red"))
        if len(sentences) > MAX_SENTENCES:
            made.add_row("", "", "", "", f"and {len(sentences) - MAX_SENTENCES} more")
    return Padding(made, (0, 0, 0, 2))


def _stage_words(stage: TimelineStage) -> Text:
    why = _short(stage.event.why)
    if len(stage.who) > 1:
        why = f"{len(stage.who)} report it, the last: {why}"
    return Text(why, style=LINK_COLOURS.get(stage.link, ""))


def _short(why: str) -> str:
    """The timeline has the whole sentence."""
    if len(why) <= MAX_SENTENCE_CHARACTERS:
        return why
    return f"{why[: MAX_SENTENCE_CHARACTERS - 3]}..."


def _lost(steps: int) -> str:
    return f"{count(steps, 'completed step')} lost"


def _timeline(run: JobRun) -> Table:
    made = table("time", "who", "what and why", right=("time",))
    for event, who, why in _folded(run.events):
        style = "red" if is_trouble(event) else "green" if event.kind in GOOD_NEWS else ""
        made.add_row(_seconds(between_ns(run.events[0], event)), who, Text(why, style=style))
    return made


def _folded(events: Sequence[Event]) -> Iterator[tuple[Event, str, str]]:
    """What people read: (event, who, why). Checkpoints in a row become one line, and so do ranks
    that report the same. `--json` has every event."""
    for is_persist, group in groupby(events, lambda e: e.kind in ("persist-started", "persisted")):
        members = list(group)
        written = [event for event in members if event.kind == "persisted"]
        if is_persist and len(written) > 1:
            first, last = written[0], written[-1]
            steps = f"steps {first.data['step']} to {last.data['step']}"
            yield last, last.who, f"{len(written)} checkpoints, {steps}; the last one: {last.why}"
            continue
        for _, alike in groupby(members, lambda e: (e.kind, e.why)):
            same = list(alike)
            yield same[0], ", ".join(dict.fromkeys(event.who for event in same)), same[0].why


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / S_NS:.3f} s"
