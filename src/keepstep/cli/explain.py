"""`keepstep explain`: what happened and why, as a timeline from the journal, and where the time
went.

As JSON: {"job", "journal", "runs": [run, ...], "unread_lines"}, only the last run unless --all; of
lines that cannot be read nobody knows which run they are of, or what they told. A run is a
`dashboard.timeline.JobRun` field by field: {"events", "recoveries", "end", "ended_well",
"lost_steps", "lost_at_least"}, and "account", a `core.economics.goodput.Account`; an event is a
line of the journal; a recovery is {"outcome", "step", "source", "lost_steps", "took_ns", "stages":
[{"link", "name", "event", "took_ns", "who"}, ...], "refused", "setbacks", "evidence",
"lost_at_least"}. "lost_steps" is null where nobody knows how many; "lost_at_least" are certain.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from keepstep.cli.job_choice import (
    JsonOption,
    job_option,
    newest_with_journal,
    print_json,
    state_dir,
)
from keepstep.core.economics.goodput import Account
from keepstep.dashboard.account_table import account_table
from keepstep.dashboard.document import as_json
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.run_screen import run_screen
from keepstep.dashboard.screen import Screen
from keepstep.dashboard.spans import incidents_of
from keepstep.dashboard.timeline import JobRun, runs_of
from keepstep.dashboard.view import Pages, run_account
from keepstep.edge.net.telemetry import send_spans
from keepstep.edge.os.journal import ReadJournal, read_all
from keepstep.edge.shm.status_pages import read_pages
from keepstep.model.units import counted


def explain(
    job: Annotated[str | None, job_option("the newest")] = None,
    json: JsonOption = False,
    every: Annotated[
        bool, typer.Option("--all", help="Show every run of the job, not only the last.")
    ] = False,
    spans: Annotated[
        bool,
        typer.Option(
            help="Send the incidents as OpenTelemetry spans where OTEL_EXPORTER_OTLP_ENDPOINT says."
        ),
    ] = False,
) -> None:
    """Show what happened to a job and why: each failure step by step, and where the time went."""
    found = newest_with_journal(job)
    pages = read_pages(found.job_dir) if found else {}
    # Where no memory is found nobody knows: it may be in another arena.
    is_alive = any(alive for alive, _ in pages.values()) if found and found.has_memory else None
    journal = read_all(found.journal_path, found.owner) if found else ReadJournal([], 0)
    runs = _runs(journal, pages)
    chosen = list(enumerate(runs, 1))[0 if every else -1 :]
    if spans:
        _send_spans(found, [run for run, _ in runs])
        return
    if json:
        print_json(_document(found, [run for _, run in chosen], journal.unread))
        return
    console = Screen()
    if not chosen:
        name = f"job {found.name}" if found else "any job"
        console.print(f"There is no journal of {name} in {state_dir()}.", highlight=False)
    name = found.name if found else ""
    for number, (run, account) in chosen:
        lives = is_alive if number == len(runs) else False
        console.print(run_screen(name, number, len(runs), run, lives), account_table(account))
    if journal.unread and found:
        console.print(
            f"{counted(journal.unread, 'line')} of {found.journal_path} cannot be read: more may "
            "have happened, and been lost, than is told here.",
            highlight=False,
        )


def _send_spans(found: FoundJob | None, runs: list[JobRun]) -> None:
    incidents = list(incidents_of(found.name if found else "", runs))
    sent = send_spans(incidents)
    print(f"{counted(len(incidents), 'incident')} sent, as {counted(sent, 'span')}.")


def _runs(journal: ReadJournal, pages: Pages) -> list[tuple[JobRun, Account]]:
    """Every run of the job, and where its time went. Whoever lives now lives in the last one."""
    runs = runs_of(journal.events)
    now = Moment.now()
    return [(run, run_account(run, pages if run is runs[-1] else {}, now)) for run in runs]


def _document(
    found: FoundJob | None, runs: list[tuple[JobRun, Account]], unread: int
) -> dict[str, Any]:
    return {
        "job": found.name if found else None,
        "journal": found.journal_path if found else None,
        "runs": [{**as_json(run), "account": account} for run, account in runs],
        "unread_lines": unread,
    }
