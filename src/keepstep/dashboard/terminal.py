"""Terminal: what the screens share: tables, ages, dates, and the list of leftovers.

Comes in: values. Goes out: rich renderables and words, readable at 100 columns. Decides nothing but
colour and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich import box
from rich.table import Table
from rich.text import Text

from keepstep.dashboard.finding import Leftover
from keepstep.dashboard.slots import SlotRow
from keepstep.model.units import S_NS, human_bytes, human_ns

SLOT_COLOURS = {"sealed": "green", "writing": "yellow", "empty": "dim", "damaged": "bold red"}
NOTHING = Text("-", style="dim")


def human_age(age_ns: int | None) -> str:
    """`0.4 s`, `12 s`, `3 min`, `2.5 h`, `4 days`: how long ago, to the precision that matters."""
    if age_ns is None:
        return "-"
    seconds = age_ns / S_NS
    for limit, unit_s, words in (
        (10, 1, "{:.1f} s"),
        (120, 1, "{:.0f} s"),
        (7200, 60, "{:.0f} min"),
        (172_800, 3600, "{:.1f} h"),
    ):
        if seconds < limit:
            return words.format(seconds / unit_s)
    return f"{seconds / 86_400:.0f} days"


def human_span(duration_ns: int) -> str:
    """How long, up to two minutes precisely."""
    return human_ns(duration_ns) if duration_ns < 120 * S_NS else human_age(duration_ns)


def clock(wall_ns: int) -> str:
    """Date and time of day, in local time."""
    return datetime.fromtimestamp(wall_ns // S_NS).isoformat(" ")


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `right` hold numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def holding(slot: SlotRow) -> str:
    """What a slot holds, in words."""
    if slot.state == "sealed":
        return f"step {slot.step}"
    return f"step {slot.step}, unsealed" if slot.state == "writing" else slot.state


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
