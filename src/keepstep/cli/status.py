"""`keepstep status`: what is protected, where, how old; what has failed and is not back yet; where
the time went.

As JSON: {"jobs": [job, ...]}, a job being a `dashboard.view.JobView` field by field: times are
nanoseconds, `horizon` is {"step", "epoch"} or null, `protection` a list of {"against", "step",
"age_ns", "why", "is_known"} (step null: not survived, or unknown), `ranks`, `slots` and `held` (for
other nodes) lists of one object each, `nodes` a `dashboard.nodes.NodesView`, null for a job of one
node, `incident` a `dashboard.timeline.Recovery` or null, `account` a `core.account.Account` or
null. With --watch one such document a line.
"""

from __future__ import annotations

import contextlib
import json as jsonlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from keepstep.cli.job_choice import (
    JobOption,
    JsonOption,
    newest_with_journal,
    places,
    print_json,
    with_memory,
)
from keepstep.dashboard import terminal
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.view import JobView, Now, as_json, job_view
from keepstep.edge.os.journal import JournalTail
from keepstep.model.events import Event


def status(
    job: JobOption = None,
    json: JsonOption = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Look again and again until Ctrl-C; in a pipe one answer after the other.",
        ),
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="S", min=0.1, help="Seconds between two looks.")
    ] = 0.5,
) -> None:
    """What is protected, where, how old."""
    looking = Looking(job)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(looking, json, interval)
    elif json:
        print_json(looking.document())
    else:
        Console().print(looking.screen())


class Looking:
    """Looks at the same jobs again and again, reading of their journals only what was added."""

    def __init__(self, job: str | None) -> None:
        self._job = job
        self._told: dict[Path, tuple[JournalTail, list[Event]]] = {}

    def _view(self, found: FoundJob) -> JobView:
        path = found.journal_path
        tail, events = self._told.setdefault(path, (JournalTail(path), []))
        events.extend(tail.read())
        return job_view(found, Now.read(), events)

    def document(self) -> dict[str, Any]:
        return {"jobs": [self._view(found) for found in with_memory(self._job)]}

    def screen(self) -> RenderableType:
        """Everything to be seen at this moment."""
        jobs = with_memory(self._job)
        if jobs:
            return Group(*(terminal.status(self._view(found)) for found in jobs))
        last = newest_with_journal(None)
        nothing = Text(f"No job holds memory in {places().arena_dir}.")
        return (
            Group(nothing, Text("The newest one that did:"), terminal.status(self._view(last)))
            if last
            else nothing
        )


def _watch(looking: Looking, json: bool, interval_s: float) -> None:
    """Until Ctrl-C, or until whoever reads goes away."""
    console = Console()
    if not json and console.is_terminal:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(looking.screen(), refresh=True)
                time.sleep(interval_s)
    while True:
        if json:
            print(jsonlib.dumps(as_json(looking.document())), flush=True)
        else:
            console.print(terminal.clock(time.time_ns()), looking.screen(), "")
        time.sleep(interval_s)
