"""`keepstep explain`: what happened and why, as a timeline from the journal, and where the time
went.

As JSON: {"job", "journal", "runs": [run, ...]}, only the last run unless --all. A run is a
`dashboard.timeline.Story` field by field: {"events", "recoveries", "end", "ended_well",
"lost_steps"}, and "account", a `core.account.Account`; an event is a line of the journal; a
recovery is {"outcome", "step", "source", "lost_steps", "took_ns", "stages": [{"link", "name",
"event", "took_ns", "who"}, ...], "refused", "setbacks", "evidence"}.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from keepstep.cli.job_choice import JobOption, JsonOption, newest_with_journal, places, print_json
from keepstep.dashboard import terminal
from keepstep.dashboard.timeline import stories
from keepstep.dashboard.view import Now, as_json, run_account
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.status_pages import read_pages


def explain(
    job: JobOption = None,
    json: JsonOption = False,
    every: Annotated[
        bool, typer.Option("--all", help="Every run of the job, not only the last.")
    ] = False,
) -> None:
    """What happened and why, as a timeline, and where the time went."""
    found = newest_with_journal(job)
    runs = stories(read_journal(found.journal_path)) if found else []
    now = Now.read()
    pages = read_pages(found.job_dir) if found else {}  # whoever lives now lives in the last run
    accounts = [run_account(run, pages if run is runs[-1] else {}, now) for run in runs]
    chosen = list(enumerate(zip(runs, accounts, strict=True), 1))[0 if every else -1 :]
    if json:
        about = (
            {"job": found.name, "journal": found.journal_path}
            if found
            else {"job": None, "journal": None}
        )
        print_json(
            {**about, "runs": [{**as_json(run), "account": spent} for _, (run, spent) in chosen]}
        )
    elif not found or not runs:
        Console().print(
            f"No journal tells of {f'job {found.name}' if found else 'any job'} in "
            f"{places().state_dir}.",
            highlight=False,
        )
    else:
        for number, (run, spent) in chosen:
            Console().print(
                terminal.story(found.name, number, len(runs), run), terminal.account(spent)
            )
