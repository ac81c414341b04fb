"""`keepstep status`: what is protected, where, how old; what has failed and is not back yet; where
the time went.

As JSON: {"jobs": [job, ...]}, a job being a `dashboard.view.JobView` field by field: times are
nanoseconds, `horizon` is {"step", "epoch"} or null, `protection` a list of {"against", "step",
"age_ns", "why", "is_known"} (step null: not survived, or unknown), `ranks`, `slots` and `held` (for
other nodes) lists of one object each, `nodes` a `dashboard.nodes.NodesView`, null for a job of one
node, `incident` a `dashboard.timeline.RecoveryChain` or null, `account` a
`core.economics.goodput.Account` or null, `slow` a list of {"rank", "section", "cause", "why",
"age_ns", "confirmed", "confirmed_why", "detail"}, `doubts` (what nobody can tell of the keeper, of
slow ranks and links, and of hangs) one of {"of", "doubt", "why", "age_ns"}, `keeper_alive` null
where nobody can tell, `parts` one of {"part", "health", "why", "fix", "age_ns"} (health ok, bad or
unknown), `links` {"slow": a list of {"side", "nodes", "ratio", "cause", "why", "age_ns"},
"damages": one of {"node", "count", "why", "age_ns"}}. With --watch one such document a line.
"""

from __future__ import annotations

import contextlib
import json as jsonlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from keepstep.cli.job_choice import (
    JsonOption,
    job_option,
    newest_with_journal,
    no_memory,
    print_json,
    with_memory,
)
from keepstep.config.option import check_seconds
from keepstep.dashboard.ages import clock
from keepstep.dashboard.document import as_json
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.screen import Screen
from keepstep.dashboard.status_screen import status_screen
from keepstep.dashboard.view import JobView, job_view
from keepstep.edge.os.journal import JournalTail
from keepstep.model.events import Event


def status(
    job: Annotated[str | None, job_option("every job that has memory")] = None,
    json: JsonOption = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Look again and again, until Ctrl-C. In a pipe, print every answer."
        ),
    ] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=0.1, help="With --watch: how often."),
    ] = 0.5,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Also what each rank's steps cost, and its slots."),
    ] = False,
) -> None:
    """Show which steps would survive which failure, what every rank does, and what is broken."""
    check_seconds("--interval", interval)
    looking = Looking(job, verbose)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(looking, json, interval)
    elif json:
        print_json(looking.document())
    else:
        Screen().print(looking.screen())


class Looking:
    """Looks at the same jobs again and again, and reads of their journals only what was added."""

    def __init__(self, job: str | None, is_whole: bool = False) -> None:
        """`job`: its name; None means all that have memory."""
        self._job, self._is_whole = job, is_whole
        self._read: dict[Path, tuple[JournalTail, list[Event]]] = {}

    def _view(self, found: FoundJob) -> JobView:
        path = found.journal_path
        tail, events = self._read.setdefault(path, (JournalTail(path, owner=found.owner), []))
        events.extend(tail.read())
        return job_view(found, Moment.now(), events)

    def document(self) -> dict[str, Any]:
        """This moment, for `--json`. Raises ConfigError when there is no such job."""
        return {"jobs": [self._view(found) for found in with_memory(self._job)]}

    def screen(self) -> RenderableType:
        """This moment, for a terminal. Raises ConfigError when there is no such job."""
        jobs = with_memory(self._job)
        if jobs:
            return Group(*(status_screen(self._view(found), self._is_whole) for found in jobs))
        last = newest_with_journal(None)
        if last is None:
            return Text(no_memory())
        return Group(Text(no_memory()), Text("The last job:"), status_screen(self._view(last)))


def _watch(looking: Looking, json: bool, interval_s: float) -> None:
    """Until Ctrl-C, or until nobody reads any more."""
    console = Screen()
    if not json and console.is_terminal:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(looking.screen(), refresh=True)
                time.sleep(interval_s)
    while True:
        if json:
            print(jsonlib.dumps(as_json(looking.document())), flush=True)
        else:
            console.print(clock(time.time_ns()), looking.screen(), "")
        time.sleep(interval_s)
