"""`keepstep lab`: a training script on several nodes of this one machine, to see what happens when
one of them is lost.

    keepstep lab --nodes 4 -- train.py --lr 0.1     in one terminal (the same as `keepstep lab run`)
    keepstep lab list                               in another
    keepstep lab kill 1 2                           lose node 2 of lab 1 with its memory; a fresh
                                                    one follows a moment later

Comes in: a command line. Goes out: the nodes' output and an exit code. The work is done in
testing/.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from keepstep.cli.job_choice import JsonOption, print_json
from keepstep.config.option import check_seconds
from keepstep.dashboard.screen import Screen
from keepstep.edge.os.needs import check_torch
from keepstep.edge.os.own_modules import module_words
from keepstep.errors import ConfigError
from keepstep.model.topology import parse_policy
from keepstep.testing.lab import Lab, numbers, owner_of
from keepstep.testing.lab_messages import KillNode, LabNodes, ListNodes, NodeKilled
from keepstep.testing.network import parse_rate, why_no_namespaces
from keepstep.testing.rehearsal import Rehearsal, ask, socket_path


class RunByDefault(TyperGroup):
    """`keepstep lab --nodes 4 -- train.py`: without a command's name, `run` is meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words of a command line, with the command's name in front."""
        if args and args[0] not in (*self.commands, "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=RunByDefault,
    no_args_is_help=True,
    help="Run a script on several nodes of this one machine, and lose nodes on purpose.",
)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Training script; with -m a module.")
    ],
    script_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Arguments for the script, passed on as they are."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Nodes of the lab.")] = 2,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks per node.")] = 1,
    module: Annotated[
        bool,
        typer.Option("--module", "-m", help="Run the script as a module, as `python -m` does."),
    ] = False,
    policy: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="What nodes keep of each other's snapshots: none, copies:M, parity:N, rs:K+M or "
            "auto.",
        ),
    ] = "auto",
    rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Speed of each node's link, such as 1gbit. Needs root."),
    ] = None,
    replace_s: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Replace a lost node after this long.")
    ] = 1.0,
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Directory or URL for checkpoints, shared by all nodes."),
    ] = None,
    loopback: Annotated[
        bool,
        typer.Option(
            "--loopback",
            help="Use loopback addresses even where network namespaces are possible.",
        ),
    ] = False,
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the nodes' journals here.")
    ] = None,
) -> None:
    """Run a script under `keepstep run` on every node of a new lab."""
    check_torch("keepstep lab")
    check_seconds("--replace-s", replace_s)
    parse_policy(policy)
    bits = None if rate is None else parse_rate(rate)
    room = Path(tempfile.mkdtemp(prefix="keepstep-lab-")) if work is None else work.absolute()
    console = Screen(stderr=True, highlight=False, soft_wrap=True)
    with Lab(nodes, room, bits, False if loopback else None) as lab:
        kind = "loopback addresses" if loopback or why_no_namespaces() else "network namespaces"
        console.print(
            f"lab {lab.number}: {nodes} nodes on {kind}; `keepstep lab kill {lab.number} NODE` "
            "loses one"
        )
        command = [
            *(sys.executable, *module_words("keepstep.cli.main", "run")),
            *run_options(nodes, nproc, lab.endpoint(), f"lab-{lab.number}", store),
            *(["-m"] if module else []),
            script,
            *(script_args or []),
        ]
        environ = {**os.environ, "KEEPSTEP_REDUNDANCY": policy}
        code = Rehearsal(lab, lambda node: command, environ, replace_s, sys.stdout).run()
    console.print(f"Journals: {room}")
    raise typer.Exit(code)


def run_options(nodes: int, nproc: int, endpoint: str, job: str, store: str | None) -> list[str]:
    """The options of `keepstep run`, which are the same on every node. A `store` that is a
    directory is made absolute: the nodes work in other directories."""
    options = ["--nnodes", str(nodes), "--nproc-per-node", str(nproc)]
    options += ["--rdzv-endpoint", endpoint, "--job", job]
    if store is not None:
        options += ["--store", store if "://" in store else os.path.abspath(store)]
    return options


@app.command()
def kill(
    lab: Annotated[
        int, typer.Argument(metavar="LAB", help="Number of the lab, as `keepstep lab list` shows.")
    ],
    node: Annotated[int, typer.Argument(metavar="NODE", help="Number of the node, from 0.")],
) -> None:
    """Lose a node: its processes, its memory, its link."""
    answer = ask(lab, KillNode(node))
    if isinstance(answer, NodeKilled):
        print(answer.why)


@app.command("list")
def show(json: JsonOption = False) -> None:
    """List the labs on this machine and their nodes."""
    found = [
        _describe(number, pid) for number in numbers() if (pid := owner_of(number)) is not None
    ]
    if json:
        print_json({"labs": found})
        return
    Screen().print(_table(found) if found else "No lab runs on this machine.")


def _table(labs: list[dict[str, Any]]) -> Table:
    table = Table("lab", "process", "node", "address", "processes", box=None)
    for lab in labs:
        name = (str(lab["lab"]), str(lab["pid"]))
        for node in lab["nodes"]:
            address = node["address"] or "lost"
            table.add_row(*name, str(node["node"]), address, str(node["processes"]))
        if not lab["nodes"]:
            table.add_row(*name, "of a drill")
    return table


def _describe(number: int, pid: int) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    if socket_path(number).exists():  # a drill's lab takes no words
        with suppress(ConfigError):  # it has ended meanwhile
            answer = ask(number, ListNodes())
            if isinstance(answer, LabNodes):
                nodes = [asdict(node) for node in answer.nodes]
    return {"lab": number, "pid": pid, "nodes": nodes}
