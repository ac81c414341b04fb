"""`keepstep placement`: who protects whom, what it costs, and how likely memory survives k lost
nodes.

Pure arithmetic: a cluster can be planned before it exists. As JSON: {"policy", "groups": [[0, 1],
..], "holders": {"0": [0, 1], ..}, "bytes_per_node_ratio", "survival": {"1": 1.0, ..},
"two_slots_ratio", "strategy", "needed": {"0": 1, ..}, "why", "racks": {"rack-0": [0, 1], ..}};
nodes count from 0, `needed` is how many holders restore a node's snapshot when the node is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from keepstep.cli.job_choice import JsonOption, print_json
from keepstep.core.redundancy.placement import Facts, auto, place
from keepstep.core.redundancy.survival import survival
from keepstep.dashboard.screen import Screen
from keepstep.errors import ConfigError
from keepstep.model.topology import Auto, Placement, Scheme, Topology, parse_policy, topology
from keepstep.model.units import GIB

SHOWN_GROUPS = 32


def placement(
    nodes: Annotated[int, typer.Option(metavar="N", help="Nodes of the job.", min=1)],
    policy: Annotated[
        str, typer.Option(metavar="POLICY", help="none, copies:M, parity:N, rs:K+M or auto.")
    ] = "copies:2",
    racks: Annotated[
        str | None,
        typer.Option(
            metavar="RACKS",
            help="Racks of the nodes: how many (of equally many nodes each), the name of each "
            "node's rack (a,a,b,b), or a file with one name per line.",
        ),
    ] = None,
    k: Annotated[
        int,
        typer.Option(metavar="K", help="Compute survival for 1 to K nodes lost at once.", min=1),
    ] = 8,
    free_gib: Annotated[
        float | None, typer.Option(metavar="GIB", help="For auto: free memory of a node.", min=0)
    ] = None,
    snapshot_gib: Annotated[
        float | None, typer.Option(metavar="GIB", help="For auto: state of a node.", min=0)
    ] = None,
    failures_per_node_hour: Annotated[
        float,
        typer.Option(
            metavar="RATE", help="For auto: how often a node fails, as with OPT-175B.", min=0
        ),
    ] = 0.015 / 24,
    json: JsonOption = False,
) -> None:
    """Show which nodes keep whose snapshots, and how likely memory survives k lost nodes.

    Pure arithmetic: starts nothing, and needs no cluster.
    """
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
            "--policy auto: expected --free-gib and --snapshot-gib to choose by, found "
            f"{'neither' if free_gib is None and snapshot_gib is None else 'only one of them'}"
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
    """For `--json`. `chosen`: why `auto` took this policy; `most`: survival up to so many lost."""
    groups = found.groups
    why = f"{found.policy}: {found.why}" if chosen is None else f"{chosen} Placement: {found.why}"
    answer: dict[str, Any] = {
        "policy": str(found.policy),
        "groups": [list(group.members) for group in groups],
        "holders": {str(node): list(holders) for node, holders in found.holders.items()},
        "bytes_per_node_ratio": found.bytes_per_node_ratio,
        "survival": {str(lost): float(p) for lost, p in survival(groups, most).items()},
        "two_slots_ratio": found.two_slots_ratio,
        "strategy": found.strategy,
        "needed": {str(member): group.needed for group in groups for member in group.members},
        "why": why,
    }
    if where.racks:
        answer["racks"] = {rack: list(ids) for rack, ids in where.racks.items()}
    return answer


def _show(found: Placement, answer: dict[str, Any]) -> None:
    console = Screen(soft_wrap=True, highlight=False)
    console.print(answer["why"])
    console.print(
        f"memory per node: {found.bytes_per_node_ratio:.3g} x its snapshot per slot, "
        f"{found.two_slots_ratio:.3g} x for the two slots that are kept"
    )
    console.print(_groups(found))
    if len(found.groups) > SHOWN_GROUPS:
        console.print(f"and {len(found.groups) - SHOWN_GROUPS} more groups (--json lists them all)")
    chances = Table("nodes lost at once", "memory survives")
    for lost, chance in answer["survival"].items():
        chances.add_row(lost, f"{chance:.2%}")
    console.print(chances)


def _groups(found: Placement) -> Table:
    table = Table("group", "nodes", "survives")
    for number, group in enumerate(found.groups[:SHOWN_GROUPS]):
        nodes = " ".join(map(str, group.members))
        limit = f"the loss of up to {group.tolerates}"
        if group.ring:
            nodes = f"ring: {nodes}"
            limit = f"any loss but of {group.tolerates + 1} neighbours"
        table.add_row(str(number), nodes, limit)
    return table
