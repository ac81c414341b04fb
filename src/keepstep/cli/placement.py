"""`keepstep placement`: who protects whom, what it costs, and how likely memory survives k lost
nodes.

Pure arithmetic: starts nothing, looks at no machine, so a cluster can be planned before it exists.
As JSON: {"policy", "groups": [[0, 1], ..], "holders": {"0": [0, 1], ..}, "bytes_per_node_ratio",
"survival": {"1": 1.0, ..}, "two_slots_ratio", "strategy", "needed": {"0": 1, ..}, "why", "racks":
{"rack-0": [0, 1], ..}}; nodes count from 0, `needed` is how many holders restore a node's snapshot
when it is gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from keepstep.cli.job_choice import JsonOption, print_json
from keepstep.core.redundancy.placement import Facts, auto, place
from keepstep.core.redundancy.survival import survival
from keepstep.errors import ConfigError
from keepstep.model.topology import Auto, Placement, Scheme, Topology, parse_policy, topology
from keepstep.model.units import GIB

SHOWN_GROUPS = 32


def placement(
    nodes: Annotated[int, typer.Option(help="How many nodes the job has.", min=1)],
    policy: Annotated[
        str, typer.Option(help="none, copies:M, parity:N, rs:K+M or auto.")
    ] = "copies:2",
    racks: Annotated[
        str | None,
        typer.Option(
            help="A number of racks (equal runs of nodes), a name per node (a,a,b,b), or a file "
            "with one name a line."
        ),
    ] = None,
    k: Annotated[int, typer.Option(help="Survival of 1 to k nodes lost at once.", min=1)] = 8,
    free_gib: Annotated[
        float | None, typer.Option(help="auto: a node's free memory.", min=0)
    ] = None,
    snapshot_gib: Annotated[float | None, typer.Option(help="auto: a node's state.", min=0)] = None,
    failures_per_node_hour: Annotated[
        float, typer.Option(help="auto: 0.015 a day is what OPT-175B saw.", min=0)
    ] = 0.015 / 24,
    json: JsonOption = False,
) -> None:
    """Show groups, holders, bytes per node and the exact probability that memory survives."""
    where = topology(nodes, None if racks is None else _rack_names(racks, nodes))
    scheme, chosen = _scheme(policy, where, free_gib, snapshot_gib, failures_per_node_hour)
    found = place(scheme, where)
    answer = _answer(found, chosen, min(k, nodes), where)
    if json:
        print_json(answer)
    else:
        _show(found, answer)


def _scheme(
    text: str, where: Topology, free_gib: float | None, snapshot_gib: float | None, failures: float
) -> tuple[Scheme, str | None]:
    policy = parse_policy(text)
    if not isinstance(policy, Auto):
        return policy, None
    if free_gib is None or snapshot_gib is None:
        raise ConfigError(
            "auto: expected --free-gib and --snapshot-gib to choose by, found only the "
            "number of nodes"
        )
    return auto(Facts(where, int(free_gib * GIB), int(snapshot_gib * GIB), failures))


def _rack_names(text: str, nodes: int) -> list[str]:
    if text.isascii() and text.isdigit():
        count = int(text)
        if not 1 <= count <= nodes:
            raise ConfigError(
                f"racks: expected 1 to {nodes} racks for {nodes} nodes, found {count}"
            )
        return [f"rack-{node * count // nodes}" for node in range(nodes)]
    if Path(text).is_file():
        return [
            name
            for line in Path(text).read_text(encoding="utf-8").splitlines()
            if (name := line.strip())
        ]
    return [name.strip() for name in text.split(",")]


def _answer(found: Placement, chosen: str | None, most: int, where: Topology) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "policy": str(found.policy),
        "groups": [list(group.members) for group in found.groups],
        "holders": {str(node): list(holders) for node, holders in found.holders.items()},
        "bytes_per_node_ratio": found.bytes_per_node_ratio,
        "survival": {
            str(lost): float(chance) for lost, chance in survival(found.groups, most).items()
        },
        "two_slots_ratio": found.two_slots_ratio,
        "strategy": found.strategy,
        "needed": {str(member): group.needed for group in found.groups for member in group.members},
        "why": f"{found.policy}: {found.why}"
        if chosen is None
        else f"{chosen} Placement: {found.why}",
    }
    if where.racks:
        answer["racks"] = {rack: list(ids) for rack, ids in where.racks.items()}
    return answer


def _show(found: Placement, answer: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(answer["why"])
    console.print(
        f"memory per node: {found.bytes_per_node_ratio:.3g} x its snapshot a slot, "
        f"{found.two_slots_ratio:.3g} x for the two slots kept"
    )
    groups = Table("group", "nodes", "survives")
    for number, group in enumerate(found.groups[:SHOWN_GROUPS]):
        limit = (
            f"fewer than {group.tolerates + 1} neighbours lost"
            if group.ring
            else f"up to {group.tolerates} lost"
        )
        groups.add_row(
            str(number), ("ring: " if group.ring else "") + " ".join(map(str, group.members)), limit
        )
    console.print(groups)
    if len(found.groups) > SHOWN_GROUPS:
        console.print(f"and {len(found.groups) - SHOWN_GROUPS} more groups (--json lists them all)")
    chances = Table("nodes lost at once", "memory survives")
    for lost, chance in answer["survival"].items():
        chances.add_row(lost, f"{chance:.2%}")
    console.print(chances)
