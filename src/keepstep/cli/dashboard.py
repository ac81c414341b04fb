"""`keepstep dashboard`: the page of a job, served by this command: of one that runs, whoever
started it, or of one that is over, from its journals.

Comes in: a job's name, places. Goes out: a page at an address that is printed, until Ctrl-C. Reads
what `keepstep status` and `keepstep explain` read, and changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from keepstep.cli.job_choice import arena_dir, named, newest_with_journal, state_dir
from keepstep.config import job_dir_of, resolve
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.journals import find_journals, jobs_below
from keepstep.errors import ConfigError
from keepstep.model.web_address import parse_web_address


def dashboard(
    job: Annotated[
        str | None,
        typer.Argument(metavar="JOB", help="Name of the job. Default: the newest."),
    ] = None,
    journals: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also take the job's journals below this directory, of its other nodes: one "
            "account over all.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Serve it there: a port of 127.0.0.1, or HOST:PORT. An address that others reach "
            "needs KEEPSTEP_DASHBOARD_TOKEN. Default: the first free port from 8610 on.",
        ),
    ] = None,
) -> None:
    """Show a job on a page in the browser: as it runs, or what became of it."""
    from keepstep.dashboard.serving import serve_job  # with it a web server, for this command alone

    found, others = _chosen(job, journals)
    settings = resolve(None, os.environ, default_job="any")
    where = address if address is not None else settings.dashboard_address
    parsed = None if where is None else parse_web_address(where)
    served = serve_job(found, parsed, settings.dashboard_token, others)
    count = f", {len(others)} journals," if len(others) > 1 else ""
    typer.echo(f"The dashboard of {found.name}{count} is at {served.url} until Ctrl-C.")
    try:
        _wait()
    finally:
        served.close()


def _wait() -> None:
    """Until somebody ends this."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with contextlib.suppress(KeyboardInterrupt):
        over.wait()


def _chosen(job: str | None, directory: Path | None) -> tuple[FoundJob, list[Path]]:
    """The job, and the journals of all its nodes that lie there. Raises ConfigError."""
    if directory is None:
        found = newest_with_journal(job)
        if found is None:
            raise ConfigError(f"JOB: expected a job with a journal in {state_dir()}, found none")
        return found, find_journals(found.journal_path.parent, found.name)
    name = job or _only_job(directory)
    others = find_journals(directory, name)
    if not others:
        raise ConfigError(
            f"--journals: expected journals of {name!r} below {directory}, found none"
        )
    with contextlib.suppress(ConfigError):
        found = named(name)
        return found, [*find_journals(found.journal_path.parent, name), *others]
    return FoundJob(name, job_dir_of(arena_dir(), name), others[0], False, 0, None), others


def _only_job(directory: Path) -> str:
    names = jobs_below(directory)
    if len(names) != 1:
        some = ", ".join(names[:5]) or "none"
        raise ConfigError(f"JOB: expected the name of a job below {directory} ({some}), found none")
    return names[0]
