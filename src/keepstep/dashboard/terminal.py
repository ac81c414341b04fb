"""Terminal: what the screens share: tables, colours, and the list of leftovers.

Comes in: values. Goes out: rich renderables and words, readable at 80 columns. Decides nothing but
colour and width.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from keepstep.dashboard.finding import Leftover
from keepstep.dashboard.sentences import Said, Tone
from keepstep.model.units import human_bytes

SLOT_COLOURS = {"sealed": "green", "writing": "yellow", "empty": "dim", "damaged": "bold red"}
NOTHING = Text("-", style="dim")
STYLES: dict[Tone, str] = {
    "": "",
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "quiet": "dim",
}


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `right` hold numbers, which are never broken."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in columns:
        is_number = name in right
        made.add_column(
            name,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number,
        )
    return made


def text(said: Said) -> Text:
    """A sentence in its colour."""
    return Text(said.text, style=STYLES[said.tone])


def leftovers(found: Sequence[Leftover]) -> Table:
    """Memory that jobs have: how much, who is alive there, where it is."""
    made = table(
        "job", "size", "for other nodes", "alive", "where", right=("size", "for other nodes")
    )
    for leftover in found:
        alive = Text(survivors(leftover), style="green" if leftover.alive else "yellow")
        held = human_bytes(leftover.held_bytes) if leftover.held_bytes else "-"
        made.add_row(leftover.job, human_bytes(leftover.bytes), held, alive, str(leftover.path))
    return made


def survivors(leftover: Leftover) -> str:
    """The processes that are alive there, in words."""
    names = [f"rank {rank} (process {pid})" for rank, pid in leftover.ranks_alive]
    if leftover.keeper_alive:
        names.append("the keeper")
    return ", ".join(names) or "no process"
