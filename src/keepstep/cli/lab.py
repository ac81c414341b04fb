"""`keepstep lab`: a training script on several nodes of this one machine, to see what happens when
one of them is lost.

    keepstep lab --nodes 4 -- train.py --lr 0.1     in one terminal (the same as `keepstep lab run`)
    keepstep lab list                               in another
    keepstep lab kill 1 2                           node 2 of lab 1 is lost with its memory; a
                                                    moment later a fresh one comes

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
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from keepstep.cli.choosing import JsonOption, print_json
from keepstep.errors import ConfigError
from keepstep.model.topology import parse_policy
from keepstep.testing.lab import Lab, numbers, owner_of
from keepstep.testing.lab_messages import KillNode, LabNodes, ListNodes, NodeKilled
from keepstep.testing.network import parse_rate, why_no_namespaces
from keepstep.testing.rehearsal import Rehearsal, ask, socket_path


class RunByDefault(TyperGroup):
    """`keepstep lab --nodes 4 -- train.py`: without a command's name, `run` is meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=RunByDefault,
    no_args_is_help=True,
    help="Rehearse: a script on several nodes of this one machine, and nodes lost on purpose.",
)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="The training script (with -m: a module).")],
    script_args: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments, handed on untouched.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 2,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks a node.")] = 1,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="The script is a module, as in python -m.")
    ] = False,
    policy: Annotated[
        str,
        typer.Option(
            help="What nodes keep of each other: none, copies:M, parity:N, rs:K+M or auto."
        ),
    ] = "auto",
    rate: Annotated[
        str | None, typer.Option(help="How fast a node's link is, such as 1gbit; needs root.")
    ] = None,
    replace_s: Annotated[float, typer.Option(min=0, help="How long a lost node stays away.")] = 1.0,
    store: Annotated[
        str | None, typer.Option(help="Directory or URL for checkpoints, shared by all nodes.")
    ] = None,
    loopback: Annotated[
        bool,
        typer.Option(
            "--loopback", help="Loopback addresses, also where network namespaces can be made."
        ),
    ] = False,
    work: Annotated[Path | None, typer.Option(help="Keep the nodes' journals here.")] = None,
) -> None:
    """Run a script under `keepstep run` on every node of a new lab."""
    parse_policy(policy)
    bits = None if rate is None else parse_rate(rate)
    room = Path(tempfile.mkdtemp(prefix="keepstep-lab-")) if work is None else work.absolute()
    console = Console(stderr=True)
    with Lab(nodes, room, bits, False if loopback else None) as lab:
        kind = "loopback addresses" if loopback or why_no_namespaces() else "network namespaces"
        console.print(
            f"lab {lab.number}: {nodes} nodes on {kind}; `keepstep lab kill {lab.number} "
            "NODE` loses one",
            highlight=False,
        )
        words = [
            *("--nnodes", nodes),
            *("--nproc-per-node", nproc),
            *("--rdzv-endpoint", lab.endpoint()),
            *("--job", f"lab-{lab.number}"),
        ]
        words += [
            *(
                ["--store", os.path.abspath(store) if "://" not in store else store]
                if store
                else []
            ),
            *(["-m"] if module else []),
        ]
        command = [
            sys.executable,
            "-m",
            "keepstep.cli.main",
            "run",
            *map(str, words),
            script,
            *(script_args or []),
        ]
        environ = {**os.environ, "KEEPSTEP_REDUNDANCY": policy}
        code = Rehearsal(lab, lambda node: command, environ, replace_s, sys.stdout).run()
    console.print(f"Journals: {room}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


@app.command()
def kill(
    lab: Annotated[int, typer.Argument(help="The lab's number, as `keepstep lab list` shows it.")],
    node: Annotated[int, typer.Argument(help="The node.")],
) -> None:
    """Lose a node: its processes, its memory, its link."""
    answer = ask(lab, KillNode(node))
    if isinstance(answer, NodeKilled):
        print(answer.why)


@app.command("list")
def show(json: JsonOption = False) -> None:
    """The labs on this machine and their nodes."""
    found = [
        _describe(number, pid) for number in numbers() if (pid := owner_of(number)) is not None
    ]
    if json:
        print_json({"labs": found})
        return
    table = Table("lab", "process", "node", "address", "processes", box=None)
    for lab in found:
        for node in lab["nodes"]:
            shown = (
                lab["lab"],
                lab["pid"],
                node["node"],
                node["address"] or "lost",
                node["processes"],
            )
            table.add_row(*map(str, shown))
        if not lab["nodes"]:
            table.add_row(str(lab["lab"]), str(lab["pid"]), "a drill's")
    Console().print(table if found else "No lab is on this machine.")


def _describe(number: int, pid: int) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    if socket_path(number).exists():  # a drill's lab takes no words
        with suppress(ConfigError):  # it has ended meanwhile
            answer = ask(number, ListNodes())
            if isinstance(answer, LabNodes):
                nodes = [asdict(node) for node in answer.nodes]
    return {"lab": number, "pid": pid, "nodes": nodes}
