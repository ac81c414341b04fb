"""`keepstep status`: what is protected, where, how old.

As JSON: {"jobs": [job, ...]}, a job being a `dashboard.view.JobView` field by field: times are nanoseconds, `horizon` is {"step",
"epoch"} or null, `protection` a list of {"against", "step", "age_ns", "why", "is_known"} (step null: not survived, or unknown),
`ranks`, `slots` and `held` (for other nodes) lists of one object each, `nodes` a `dashboard.nodes.NodesView`, null for a job of one node.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from keepstep.cli.choosing import JobOption, JsonOption, newest_with_journal, places, print_json, with_memory
from keepstep.dashboard import terminal
from keepstep.dashboard.view import Now, job_view
from keepstep.errors import ConfigError

WATCH_EVERY_S = 0.5


def status(
    job: JobOption = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again twice a second until Ctrl-C.")] = False,
) -> None:
    """What is protected, where, how old."""
    if watch and json:
        raise ConfigError("expected --watch or --json, found both: --json prints one document")
    if json:
        now = Now.read()
        print_json({"jobs": [job_view(found, now) for found in with_memory(job)]})
    elif watch:
        if not Console().is_terminal:
            raise ConfigError("--watch: expected a terminal, found a file or a pipe; without it the answer comes once")
        try:
            with Live(screen=True, auto_refresh=False) as live:
                while True:
                    live.update(screen(job), refresh=True)
                    time.sleep(WATCH_EVERY_S)
        except KeyboardInterrupt:
            return
    else:
        Console().print(screen(job))


def screen(job: str | None) -> RenderableType:
    """Everything to be seen at this moment."""
    now = Now.read()
    jobs = with_memory(job)
    if jobs:
        return Group(*(terminal.status(job_view(found, now)) for found in jobs))
    last = newest_with_journal(None)
    nothing = Text(f"No job holds memory in {places().arena_dir}.")
    return Group(nothing, Text("The newest one that did:"), terminal.status(job_view(last, now))) if last else nothing
