"""`keepstep run`: torchrun's arguments, so that a user replaces one word, and keepstep's own.

Comes in: a command line and torchrun's `PET_*` variables. Goes out: a `Launch` and a `Config`, then
the agent's exit code. Decides nothing about the job; imports torch only when it runs one.

There are two processes: the supervisor, which `keepstep run` is at first, and the agent, which it
starts with the same command line. Both parse it, so that the supervisor refuses what is wrong.
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from inspect import Parameter
from typing import Annotated, Any

import typer

from keepstep.cli.launch_arguments import (
    TORCHRUN,
    LaunchArguments,
    build_launch,
    check_prebuild,
    check_script,
    remarks,
)
from keepstep.cli.parameters import by_panel, from_arguments, from_options, panel_of, takes
from keepstep.config import Config, from_environ, from_mapping
from keepstep.config.option import Topic
from keepstep.config.table import OPTIONS
from keepstep.edge.os.needs import check_torch
from keepstep.edge.os.voice import speak_of_job
from keepstep.model.launch import PREBUILD, Launch
from keepstep.runtime.agent.supervisor import PREDECESSOR, REPORT, SUPERVISOR, keep_agent

# The first word that is no option is the script: what follows is its own. `--nproc_per_node` is
# `--nproc-per-node`.
CONTEXT_SETTINGS: dict[str, Any] = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}

ScriptArgument = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT", help="Training script; with -m a module, with --no-python a program."
    ),
]
ScriptArgsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Arguments for the script, passed on as they are."),
]
PARAMETERS = [
    Parameter("script", Parameter.KEYWORD_ONLY, annotation=ScriptArgument),
    Parameter("script_args", Parameter.KEYWORD_ONLY, default=None, annotation=ScriptArgsArgument),
    *by_panel(
        [*from_arguments(LaunchArguments), *from_options(OPTIONS)],
        [TORCHRUN, *map(panel_of, Topic)],
    ),
]


@takes(PARAMETERS)
def run(**given: Any) -> None:
    """Run a training script and keep it alive: torchrun's arguments, every step protected.

    On several nodes, start the same command on each.
    """
    arguments = launch_arguments(given)
    launch, config = understand(given, os.environ.get("PYTHON_EXEC", sys.executable))
    if SUPERVISOR not in os.environ:
        check_script(arguments)
        check_prebuild(given["prebuild"] or os.environ.get(PREBUILD, ""), arguments)
        for remark in remarks(arguments):
            typer.echo(f"keepstep: {remark}", err=True)
    raise typer.Exit(_run(launch, config))


def launch_arguments(given: dict[str, Any]) -> LaunchArguments:
    """torchrun's part of a command line, from the command's parameters by name."""
    values = {f.name: given[f.name] for f in fields(LaunchArguments)}
    values["script_args"] = tuple(given["script_args"] or ())
    return LaunchArguments(**values)


def understand(given: dict[str, Any], python: str) -> tuple[Launch, Config]:
    """What a command line asks for: which ranks to start, and the options that it sets.

    given: the command's parameters by name. python: the interpreter that runs the script.

    Raises ConfigError naming option, expected and found.
    """
    arguments = launch_arguments(given)
    options = {option.name: given[option.name] for option in OPTIONS if not option.is_secret}
    if options["host"] is None and arguments.local_addr:
        options["host"] = arguments.local_addr
    return build_launch(arguments, python), from_mapping(options)


def _run(launch: Launch, config: Config) -> int:
    """Be the supervisor or, as its child, the agent; the exit code of the job."""
    speak_of_job(config.log or from_environ(os.environ).log or "info")
    check_torch("keepstep run")
    if SUPERVISOR not in os.environ:
        return keep_agent(sys.argv[1:], os.environ)
    environ = dict(os.environ)
    for name in (SUPERVISOR, PREDECESSOR, REPORT):  # not for the ranks
        os.environ.pop(name, None)
    from keepstep.dashboard.serving import serve_for_agent
    from keepstep.runtime.agent.process import supervise  # imports torch

    return supervise(launch, config, environ, serve_for_agent)
