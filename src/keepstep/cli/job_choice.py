"""Choosing: which job a command means, and how an answer leaves as JSON.

Where memory and journals lie comes from `KEEPSTEP_*` variables and the defaults, as for the job
itself.
"""

from __future__ import annotations

import difflib
import json
import os
from typing import Annotated, Any

import typer

from keepstep.config import Settings, resolve
from keepstep.dashboard.finding import FoundJob, find_jobs
from keepstep.dashboard.view import as_json
from keepstep.errors import ConfigError

JobOption = Annotated[
    str | None,
    typer.Option(
        "--job", metavar="NAME", help="The job; without it the newest, or all that hold memory."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")]


def places() -> Settings:
    """Settings for looking: `arena_dir` and `state_dir` count, the job's name does not."""
    return resolve(None, os.environ, default_job="any")


def named(name: str) -> FoundJob:
    """Raises ConfigError naming what there is."""
    jobs = find_jobs(places())
    for job in jobs:
        if job.name == name:
            return job
    raise ConfigError(
        f"--job: expected one of {len(jobs)} known jobs ({_some(jobs)}), found "
        f"{name!r}{_hint(name, jobs)}"
    )


def with_memory(name: str | None) -> list[FoundJob]:
    """The named job, or all jobs that hold memory, the newest first. Raises ConfigError."""
    return [named(name)] if name else [job for job in find_jobs(places()) if job.has_memory]


def newest_with_journal(name: str | None) -> FoundJob | None:
    """The named job, or the newest that has a journal. Raises ConfigError."""
    if name:
        return named(name)
    return next((job for job in find_jobs(places()) if job.journal_path.exists()), None)


def print_json(value: Any) -> None:
    """One document on standard output."""
    print(json.dumps(as_json(value), indent=2))


def _some(jobs: list[FoundJob], limit: int = 5) -> str:
    names = ", ".join(job.name for job in jobs[:limit]) or "none"
    return names + (f" and {len(jobs) - limit} more" if len(jobs) > limit else "")


def _hint(name: str, jobs: list[FoundJob]) -> str:
    near = difflib.get_close_matches(name, [job.name for job in jobs], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
