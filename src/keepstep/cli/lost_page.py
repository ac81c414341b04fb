"""`docs/lost.md`: what is lost when. Made from the faults below and the product's own arithmetic of
who survives how many lost nodes.

`python -m keepstep.cli.lost_page` prints it; `make docs` writes it.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

from keepstep.core.redundancy.placement import place
from keepstep.core.redundancy.survival import survival
from keepstep.model.topology import Scheme, parse_policy, topology

NODES = 8
POLICIES = ("none", "copies:2", "copies:3", "parity:4", "rs:2+2")
HEAD = """\
# What is lost when

<!-- Made by `make docs` from src/keepstep/cli/lost_page.py: edit that. -->

A fault, a redundancy, and what a training goes on from. The chances are those of a job of {nodes}
nodes, exactly counted by `keepstep placement`; give yours to that command. *p* is the period of
captures, 1 where a capture fits into a step; `keepstep status` tells it.

With several nodes that counts from the newest step that all keepers agree upon. While a link
between two of them is silent, and not yet given up (`link_dead_s`, 20 s), they agree upon nothing
new: each rank captures until its slots are full, and whatever happens in that time, a killed rank
too, goes back to before it. `keepstep status` shows the step and its age, and the link.

"""
FOOT = """
Seconds are from the fault until all ranks have done the next step, measured on two cores with a
small model; the commands stand beside them in [Operations](operations.md#when-a-rank-dies). With
larger models reading the state back comes on top ([Performance](performance.md)). "All anew" is
what happens without `with step:` and `keepstep.init_process_group`, under other launchers, and with
GPUs: [GPUs](gpu.md).

With none of the copies of a rank's state left, and no store or an empty one, a job begins anew by
itself, also where memory holds other ranks' states: equal replicas do not stand in for each other,
with `share_replicas` either. It refuses, and says what to do, where memory holds the state of
another number of ranks, where the store cannot be read or none of its checkpoints can be used, and
where states are in doubt or replicas differ; `--fresh` begins anew then, too. The sentence on
stderr says which.
"""
STAYS = "0.1 s where a process stands by; 2 s where none does; 4.4 s all anew"
NOTHING = "no time"


@dataclass(frozen=True, slots=True)
class FaultCase:
    """`lost_nodes`: so many lose their memory; 0: none, and redundancy plays no part."""

    name: str
    lost_nodes: int
    source: str
    steps: str
    seconds: str


FAULTS = (
    FaultCase("a rank is killed, or crashes", 0, "own memory", "at most 2p - 1", STAYS),
    FaultCase("a rank hangs", 0, "own memory", "at most 2p - 1", "the same, once it is named"),
    FaultCase("all ranks of a node die", 0, "own memory", "at most 2p - 1", "4.4 s all anew"),
    FaultCase("the agent is killed", 0, "own memory", "at most 2p - 1", "4.4 s all anew"),
    FaultCase("the keeper is killed or hangs", 0, "training goes on", "0", NOTHING),
    FaultCase("the store is away or full", 0, "training goes on", "0", NOTHING),
    FaultCase("a bit flips in a snapshot", 0, "training goes on; it is mended or void", "0",
          NOTHING),
    FaultCase("a device computes wrong for a while", 0, "own memory, by `wrong_numbers`",
          "0: the step is run again", "two steps"),
    FaultCase("one node is lost", 1, "", "at most 2p - 1 after the last commit",
          "a few seconds and the fetch, once another node is there"),
    FaultCase("two nodes are lost at once", 2, "", "at most 2p - 1 after the last commit",
          "a few seconds and the fetch, once others are there"),
    FaultCase("three nodes are lost at once", 3, "", "at most 2p - 1 after the last commit",
          "a few seconds and the fetch, once others are there"),
    FaultCase("power fails everywhere", NODES, "", "", ""),
)  # fmt: skip
FROM_STORE = (
    "the newest checkpoint in the store",
    "those since that checkpoint",
    "a start, and reading the store",
)


def page() -> str:
    """The whole page: Markdown around one table, which `lost.js` filters."""
    rows = [_row(fault, policy) for fault in FAULTS for policy in POLICIES]
    table = [
        '<table class="lost"><thead><tr><th>fault</th><th>redundancy</th><th>goes on from</th>'
        "<th>steps lost</th><th>takes</th></tr></thead><tbody>",
        *rows,
        "</tbody></table>",
    ]
    return HEAD.format(nodes=NODES) + "\n".join(table) + "\n" + FOOT


def goes_on(fault: FaultCase, policy: str) -> tuple[str, str, str]:
    """From where, steps lost, and how long it takes."""
    if fault.lost_nodes == 0:
        return fault.source, fault.steps, fault.seconds
    scheme = parse_policy(policy)
    chance = 0.0
    if policy != "none" and fault.lost_nodes < NODES:
        assert isinstance(scheme, Scheme)
        groups = place(scheme, topology(NODES)).groups
        chance = float(survival(groups, fault.lost_nodes)[fault.lost_nodes])
    if chance == 0:
        return FROM_STORE
    if chance == 1:
        return "other nodes' memory", fault.steps, fault.seconds
    source = f"other nodes' memory in {chance:.0%} of the cases; else {FROM_STORE[0]}"
    return source, f"{fault.steps}; else {FROM_STORE[1]}", f"{fault.seconds}; else {FROM_STORE[2]}"


def _row(fault: FaultCase, policy: str) -> str:
    cells = (fault.name, policy, *goes_on(fault, policy))
    return f"<tr>{''.join(f'<td>{html.escape(cell, quote=False)}</td>' for cell in cells)}</tr>"


if __name__ == "__main__":
    print(page(), end="")
