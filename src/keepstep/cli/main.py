"""`keepstep`: the commands, put together.

Importing this imports no torch: `keepstep status` must answer while a machine is busy. An error
that keepstep raises on purpose is printed as one sentence, with exit code 2; any other is our own
mistake and keeps its traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from keepstep import __version__
from keepstep.cli.audit import audit
from keepstep.cli.clean import clean
from keepstep.cli.compare import compare
from keepstep.cli.diagnose import diagnose
from keepstep.cli.doctor import doctor
from keepstep.cli.drill import drill
from keepstep.cli.explain import explain
from keepstep.cli.inspect import inspect
from keepstep.cli.lab import app as lab
from keepstep.cli.placement import placement
from keepstep.cli.plan import plan
from keepstep.cli.profile import profile
from keepstep.cli.run import CONTEXT_SETTINGS, run
from keepstep.cli.simulate import simulate
from keepstep.cli.status import status
from keepstep.cli.timeouts import timeouts
from keepstep.errors import KeepstepError


class Commands(TyperGroup):
    """Typer's group, which prints keepstep's own errors as a sentence."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Exit code 2 after an error of keepstep's own."""
        try:
            return super().invoke(ctx)
        except KeepstepError as error:
            Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
            raise typer.Exit(2) from error


TRAINING = "Train"
LOOKING = "Look at jobs"
PLANNING = "Plan"

app = typer.Typer(
    name="keepstep",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"keepstep {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Keep PyTorch training alive through failures.

    Every step is held in memory that outlives the trainer, and proven restorable.
    """


app.command(context_settings=CONTEXT_SETTINGS, rich_help_panel=TRAINING)(run)
app.command(context_settings=CONTEXT_SETTINGS, rich_help_panel=TRAINING)(audit)
for panel, commands in (
    (TRAINING, (drill, doctor)),
    (LOOKING, (status, explain, diagnose, inspect, compare, profile, clean)),
    (PLANNING, (placement, plan, simulate, timeouts)),
):
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(lab, name="lab", rich_help_panel=TRAINING)


def leave(code: str | int | None) -> NoReturn:
    """End this process at once with that exit code.

    A thread of an agent may still wait in torch's store, and an interpreter that ends meanwhile
    aborts: the supervisor would take an agent whose job is over for one that was killed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":  # agents are started so
    try:
        app()
    except SystemExit as end:
        leave(end.code)
