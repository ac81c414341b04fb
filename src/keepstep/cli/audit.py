"""`keepstep audit`: what a program changes while it trains and was not given to `protect`.

As JSON: a `core.comparison.omissions.Audit` field by field: {"compared", "omissions": [{"name",
"kind", "paths"}, ...], "consequences", "undetermined", "records"}. Exit code 0: nothing is missing;
1: something is; 2: the program does not come so far.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from keepstep.cli.clean import remove
from keepstep.cli.job_choice import JsonOption, arena_dir, print_json
from keepstep.core.comparison.omissions import Audit, Omission
from keepstep.dashboard.finding import find_leftovers
from keepstep.dashboard.screen import Screen
from keepstep.errors import ConfigError
from keepstep.model.units import counted

SHOWN_PATHS = 3


def audit(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Training script.")],
    script_args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments for the script.")
    ] = None,
    kill_at: Annotated[
        int, typer.Option(min=2, help="Kill it when this step is about to begin.")
    ] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Look at it this many steps later.")] = 4,
    within: Annotated[
        float, typer.Option(min=1, help="Seconds that each of the four runs may take.")
    ] = 300.0,
    json: JsonOption = False,
) -> None:
    """Run a script undisturbed and restored, and name what `protect` was not given.

    Exit code 1: something was not.
    """
    if not Path(script).is_file():
        raise ConfigError(f"audit: expected a Python script, found none at {script!r}")
    from keepstep.testing.audit.rounds import hold_audit

    place = arena_dir()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="audit-", dir=place) as work:
        try:
            command = (script, *(script_args or ()))
            found = hold_audit(command, Path(work), kill_at, kill_at + steps, within)
        finally:
            for leftover in find_leftovers(Path(work)):
                remove(leftover)
    if json:
        print_json(found)
    else:
        _print(Screen(), found)
    if not found.is_complete:
        raise typer.Exit(1)


def _print(console: Console, found: Audit) -> None:
    count = len(found.omissions)
    were = "was" if count == 1 else "were"
    told = f"{counted(count, 'value')} that the program changes {were} not given to protect"
    if found.is_complete:
        told = "Everything that the program changes was given to protect"
    told = f"{told}: {found.compared} looked at, after a restore and without one."
    console.print(Text(told, style="bold"), soft_wrap=True)
    for omission in found.omissions:
        console.print(_line(omission), style="red", soft_wrap=True, highlight=False, markup=False)
    for omission in found.consequences:
        line = f"differs some steps later, as a consequence: {_line(omission)}"
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    for omission in found.undetermined:
        line = f"not the same in two undisturbed runs: {_line(omission)}"
        console.print(line, style="yellow", soft_wrap=True, highlight=False, markup=False)
    for path in found.records:
        line = f"a record of what the process has done, not kept: {path}"
        console.print(line, style="dim", soft_wrap=True, highlight=False, markup=False)


def _line(omission: Omission) -> str:
    shown = ", ".join(omission.paths[:SHOWN_PATHS])
    more = len(omission.paths) - SHOWN_PATHS
    return f"{omission.kind}: {shown}{f' and {more} more below' if more > 0 else ''}"
