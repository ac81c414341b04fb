"""Which job a command means, and how an answer leaves as JSON.

Where memory and journals are is found in `KEEPSTEP_*` variables and the defaults, as for the job
itself.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from keepstep.config import resolve
from keepstep.config.settings import BY_VARIABLE
from keepstep.dashboard.document import as_json
from keepstep.dashboard.finding import FoundJob, find_jobs
from keepstep.errors import ConfigError

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables.")
]


def job_option(default: str) -> Any:
    """The option --job; `default` says which job is meant without it."""
    return typer.Option("--job", metavar="NAME", help=f"Name of the job. Default: {default}.")


def arena_dir() -> Path:
    """Where jobs have their memory."""
    return resolve(None, _places(), default_job="any").arena_dir


def state_dir() -> Path:
    """Where jobs have their journals."""
    return resolve(None, _places(), default_job="any").state_dir


def _places() -> dict[str, str]:
    """The environment without other options' values: whoever only looks at jobs needs them not, and
    is not to be refused for one. A name that is no option's is still an error: it may be a place's,
    misspelt."""
    said = ("KEEPSTEP_ARENA_DIR", "KEEPSTEP_STATE_DIR")
    return {k: v for k, v in os.environ.items() if k in said or k not in BY_VARIABLE}


def all_jobs() -> list[FoundJob]:
    """Every job of this node, the newest first."""
    return find_jobs(arena_dir(), state_dir())


def named(name: str) -> FoundJob:
    """The job of that name. Raises ConfigError naming those that there are."""
    jobs = all_jobs()
    for job in jobs:
        if job.name == name:
            return job
    raise ConfigError(
        f"--job: expected one of {len(jobs)} known jobs ({_some(jobs)}), found "
        f"{name!r}{_hint(name, jobs)}"
    )


def with_memory(name: str | None) -> list[FoundJob]:
    """The named job, or all jobs that have memory, the newest first. Raises ConfigError."""
    return [named(name)] if name else [job for job in all_jobs() if job.has_memory]


def newest_with_journal(name: str | None) -> FoundJob | None:
    """The named job, or the newest that has a journal. Raises ConfigError."""
    if name:
        return named(name)
    return next((job for job in all_jobs() if job.journal_path.exists()), None)


def no_memory() -> str:
    """What to say where no job has memory."""
    return f"No job has memory in {arena_dir()}."


def print_json(value: Any) -> None:
    """Print a value as one JSON document on standard output."""
    print(json.dumps(as_json(value), indent=2))


def _some(jobs: list[FoundJob], limit: int = 5) -> str:
    names = ", ".join(job.name for job in jobs[:limit]) or "none"
    return names + (f" and {len(jobs) - limit} more" if len(jobs) > limit else "")


def _hint(name: str, jobs: list[FoundJob]) -> str:
    near = difflib.get_close_matches(name, [job.name for job in jobs], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
