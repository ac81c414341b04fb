"""`keepstep`: the commands, put together.

Importing this imports no torch: `keepstep status` must answer while a machine is busy. An error
that keepstep raises on purpose, and a command line that it does not understand, is printed as one
sentence, with exit code 2; any other error is our own mistake and keeps its traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text
from typer.core import TyperGroup

from keepstep import __version__
from keepstep.cli.audit import audit
from keepstep.cli.clean import clean
from keepstep.cli.compare import compare
from keepstep.cli.dashboard import dashboard
from keepstep.cli.demo import demo
from keepstep.cli.diagnose import diagnose
from keepstep.cli.doctor import doctor
from keepstep.cli.drill import drill
from keepstep.cli.explain import explain
from keepstep.cli.help import help_about
from keepstep.cli.inspect import inspect
from keepstep.cli.lab import app as lab
from keepstep.cli.placement import placement
from keepstep.cli.plan import plan
from keepstep.cli.preflight import preflight
from keepstep.cli.profile import profile
from keepstep.cli.run import CONTEXT_SETTINGS, run
from keepstep.cli.simulate import simulate
from keepstep.cli.status import status
from keepstep.cli.timeouts import timeouts
from keepstep.dashboard.screen import Screen
from keepstep.errors import KeepstepError

# click's; typer has a copy of its own in some releases, and takes the installed one in others
UsageError: type[Any] = typer.BadParameter.__bases__[0]


class Commands(TyperGroup):
    """Typer's group, which prints keepstep's own errors, and typer's, as a sentence."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Read keepstep's own options. Exit code 2 where they cannot be understood."""
        try:
            return super().make_context(*args, **more)
        except UsageError as error:
            _refuse(error, _misread(error))

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Exit code 2 after an error of keepstep's own, or of the user's."""
        try:
            return super().invoke(ctx)
        except KeepstepError as error:
            _refuse(error, str(error))
        except UsageError as error:
            _refuse(error, _misread(error))


def _refuse(error: Exception, why: str) -> NoReturn:
    told = Text(f"error: {why}", style="red")
    Screen(stderr=True).print(told, soft_wrap=True)
    raise typer.Exit(2) from error


def _misread(error: Any) -> str:
    """What of a command line was not understood, the nearest that there is, and where to look."""
    if type(error).__name__ == "NoArgsIsHelpError":
        raise error  # nothing was said: the help follows
    said = error.message if getattr(error, "possibilities", None) else error.format_message()
    why = " ".join(said.split()).rstrip(".")
    if near := getattr(error, "possibilities", None):
        why += f"; did you mean {' or '.join(near)}?"
    if "unexpected extra argument" in why and "--job" in _options_of(error.ctx):
        why += "; a job is named with --job"
    named = "keepstep" if error.ctx is None else error.ctx.command_path
    end = "" if why.endswith("?") else "."
    return f"{why[:1].lower()}{why[1:]}{end} `{named} --help` lists what there is"


def _options_of(context: Any) -> list[str]:
    """Of the command that was called, as they are spelt."""
    parameters = [] if context is None else context.command.params
    return [spelling for parameter in parameters for spelling in parameter.opts]


TRAINING = "Train"
LOOKING = "Look at jobs"
PLANNING = "Plan"

app = typer.Typer(
    name="keepstep",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
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
    (TRAINING, (demo, drill, doctor, preflight)),
    (LOOKING, (status, explain, dashboard, diagnose, inspect, compare, profile, clean)),
    (PLANNING, (placement, plan, simulate, timeouts)),
):
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.command(name="help", rich_help_panel=LOOKING)(help_about)
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
