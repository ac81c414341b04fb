"""Where the time of a run went, as a table whose shares sum to 100 %.

Comes in: an `Account`. Goes out: a rich renderable.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from keepstep.core.economics.goodput import Account
from keepstep.dashboard.ages import human_span
from keepstep.dashboard.terminal import table

PARTS = {
    "productive": "steps that count",
    "stalled": "the trainer waited for keepstep",
    "redone": "steps done a second time",
    "detecting": "from a failure until it was noticed",
    "recovering": "until all ranks trained again",
    "starting": "before the first step",
    "idle": "no rank ran, or none was heard of",
}
COLOURS = {
    "productive": "green",
    "detecting": "yellow",
    "recovering": "yellow",
    "redone": "yellow",
}


def account_table(spent: Account) -> RenderableType:
    """Part by part; nothing of a run that has not trained."""
    if spent.goodput_ratio is None:
        return Text("")
    made = table("where the time went", "time", "share", "", right=("time", "share"))
    parts = spent.parts()
    for (name, ns), tenths in zip(parts.items(), shares(list(parts.values()), 1000), strict=True):
        if ns:
            label = Text(name, style=COLOURS.get(name, ""))
            made.add_row(label, human_span(ns), f"{tenths / 10:.1f} %", PARTS[name])
    made.add_row("in all", human_span(spent.wall_ns), "100.0 %", "", style="bold")
    doubt = unknown_losses_words(spent.unknown_losses)
    return Group(made, Text(doubt, style="yellow")) if doubt else made


def unknown_losses_words(count: int) -> str:
    """What the account cannot tell; empty when there is nothing."""
    if not count:
        return ""
    often = "once" if count == 1 else f"{count} times"
    return f"Productive is at most that: {often} nobody knew how many completed steps were lost"


def shares(amounts: Sequence[int], whole: int) -> list[int]:
    """`whole` divided as `amounts` are, in whole numbers that sum to it: what rounding leaves goes
    to the largest remainders."""
    total = sum(amounts)
    floors = [amount * whole // total for amount in amounts]
    by_remainder = sorted(range(len(amounts)), key=lambda i: (-(amounts[i] * whole % total), i))
    for index in by_remainder[: whole - sum(floors)]:
        floors[index] += 1
    return floors
