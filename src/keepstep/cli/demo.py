"""`keepstep demo`: kills a rank of a small training, and compares the end with an undisturbed run.

Comes in: how many steps and ranks. Goes out: an exit code: 0 where both ends are the same bits and
one recovery was seen, else 1. What it does is in `testing/demo.py`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from keepstep.edge.os.needs import check_torch


def demo(
    steps: Annotated[
        int, typer.Option("--steps", min=20, metavar="N", help="Steps of each of the two runs.")
    ] = 100,
    ranks: Annotated[
        int, typer.Option("--nproc-per-node", min=2, metavar="N", help="Ranks of each run.")
    ] = 2,
) -> None:
    """Watch a rank be killed and the training go on: two runs of a small GPT, a minute."""
    check_torch("keepstep demo")
    from keepstep.testing.demo import demonstrate

    raise typer.Exit(demonstrate(steps, ranks))
