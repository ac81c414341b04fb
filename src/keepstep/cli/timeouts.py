"""`keepstep timeouts`: every limit that is used to tell a hang from a slow step, and which must be
shorter than which.

Starts nothing. Reads `KEEPSTEP_HANG_AFTER_S` and `KEEPSTEP_LINK_DEAD_S` as a job
would, and the options before them. As JSON: {"learns", "limits": [{"name", "seconds", "meaning"}],
"relations": [{"shorter", "shorter_s", "longer", "longer_s", "why"}]}.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.table import Table

from keepstep.cli.job_choice import JsonOption, print_json
from keepstep.cli.parameters import named_option
from keepstep.config import Config, resolve
from keepstep.core.detection.deadlines import Deadlines, derive, relations, table
from keepstep.dashboard.screen import Screen


def timeouts(
    hang_after_s: Annotated[float | None, named_option("hang_after_s")] = None,
    link_dead_s: Annotated[float | None, named_option("link_dead_s")] = None,
    nodes: Annotated[int, typer.Option(help="Nodes of the job.", min=1)] = 1,
    json: JsonOption = False,
) -> None:
    """Show the time limits of failure detection, and why they are in this order."""
    settings = resolve(
        Config(hang_after_s=hang_after_s, link_dead_s=link_dead_s), os.environ, default_job="any"
    )
    deadlines = derive(settings.hang_after_s, settings.link_dead_s if nodes > 1 else None)
    if json:
        limits = [
            dict(zip(("name", "seconds", "meaning"), row, strict=True)) for row in table(deadlines)
        ]
        order = [
            dict(zip(("shorter", "shorter_s", "longer", "longer_s", "why"), row, strict=True))
            for row in relations(deadlines)
        ]
        print_json({"learns": deadlines.learns, "limits": limits, "relations": order})
    else:
        _show(deadlines)


def _show(deadlines: Deadlines) -> None:
    console = Screen(soft_wrap=True, highlight=False)
    if deadlines.learns:
        console.print(
            "late, asleep and busy are floors: the job raises them to fit its own steps. Set "
            "hang_after_s to fix asleep and busy."
        )
    else:
        console.print(
            "hang_after_s is set: it fixes asleep and busy, however long the job's steps take."
        )
    limits = Table("limit", "seconds", "meaning")
    for name, seconds, meaning in table(deadlines):
        limits.add_row(name, f"{seconds:g}", meaning)
    console.print(limits)
    order = Table("this", "s", "before this", "s", "because")
    for shorter, shorter_s, longer, longer_s, why in relations(deadlines):
        order.add_row(shorter, f"{shorter_s:g}", longer, f"{longer_s:g}", why)
    console.print(order)
