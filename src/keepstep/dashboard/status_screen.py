"""The screen of `keepstep status`: what is protected, what has failed and is not back yet, who does
what, where the time went.

Comes in: a `JobView`. Goes out: rich renderables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from keepstep.core.resume.cadence import at_most_lost_steps
from keepstep.dashboard.account_table import account_table
from keepstep.dashboard.nodes import NodeRow, NodesView
from keepstep.dashboard.run_screen import chain
from keepstep.dashboard.slots import SlotRow
from keepstep.dashboard.terminal import (
    NOTHING,
    SLOT_COLOURS,
    clock,
    holding,
    human_age,
    table,
)
from keepstep.dashboard.view import JobView, RankRow
from keepstep.model.units import S_NS, human_bytes, human_ns

STATE_COLOURS = {
    "training": "green",
    "restoring": "yellow",
    "waiting": "yellow",
    "broken": "red",
    "left-over": "yellow",
    "ended": "dim",
}
# The leading keeper reports when something changes; an older report is shown with its age.
OLD_NS = 5 * S_NS
PLURALS = {"copy": "copies", "parity": "parities"}


def status_screen(view: JobView) -> RenderableType:
    """Everything about one job."""
    state = (view.state, STATE_COLOURS[view.state])
    title = Text.assemble((view.job, "bold"), "  ", state, f"  {view.why}")
    if view.job_dir is None:
        return Group(title, _checkpoint(view))
    return Group(
        title,
        _place(view),
        *(_nodes(view.nodes) if view.nodes is not None else []),
        *_incident(view),
        _protection(view),
        *_period(view),
        _ranks(view),
        _costs(view),
        _slots(view),
        *_held(view.held),
        *([account_table(view.account)] if view.account else []),
    )


def _checkpoint(view: JobView) -> str:
    stored = view.checkpoint
    if stored is None:
        return "no checkpoint"
    return f"newest checkpoint: step {stored.step}, {human_age(stored.age_ns)} old"


def _place(view: JobView) -> Text:
    style = "" if view.keeper_alive else "yellow"
    keeper = (f"the keeper is {'alive' if view.keeper_alive else 'not alive'}", style)
    return Text.assemble("memory in ", str(view.job_dir), "; ", keeper)


def _incident(view: JobView) -> Iterator[RenderableType]:
    """What has failed and is not back yet."""
    if view.incident is None:
        return
    began = view.incident.stages[0].event if view.incident.stages else None
    since = "" if began is None else f" since {clock(began.wall_ns)}"
    yield Text(f"Recovering{since}:", style="bold yellow")
    yield chain(view.incident, began)


# -- several nodes


def _nodes(nodes: NodesView) -> Iterator[Text]:
    """Which nodes may be lost right now, in a few lines."""
    if nodes.policy is None:
        yield Text(f"Several nodes: {nodes.doubt}.", style="yellow")
        return
    here = "" if nodes.here is None else f" (this is node {nodes.here})"
    name = f"{len(nodes.nodes)} nodes{here}, {nodes.policy}"
    if nodes.doubt:
        yield Text(f"{name}: which may be lost is unknown: {nodes.doubt}.", style="yellow")
        age = human_age(nodes.told_age_ns)
        yield Text(f"{age} ago: {_committed(nodes)}; {nodes.why}.", style="dim")
        return
    yield _verdict(name, nodes)
    for row in nodes.nodes:
        if not row.linked:
            yield Text(
                f"Node {row.node} ({row.host}, {_ranks_of(row)}) has no open link to the leading "
                "keeper.",
                style="yellow",
            )
    if (nodes.told_age_ns or 0) > OLD_NS:
        yield Text(
            f"Reported {human_age(nodes.told_age_ns)} ago and unchanged since, unless the leading "
            "node was lost and the keeper here has not noticed yet.",
            style="dim",
        )


def _committed(nodes: NodesView) -> str:
    if nodes.step is None:
        return "no step is held by every rank yet"
    return f"step {nodes.step} is {'' if nodes.is_committed else 'not yet '}committed"


def _verdict(name: str, nodes: NodesView) -> Text:
    why = "" if nodes.step is None else f" {nodes.why[:1].upper()}{nodes.why[1:]}."
    colour = "green" if (nodes.any_nodes or 0) > 0 else "bold red"
    return Text.assemble(f"{name}: {_committed(nodes)}.", (why, colour))


def _ranks_of(row: NodeRow) -> str:
    first, last = row.ranks[0], row.ranks[-1]
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


# -- tables


def _protection(view: JobView) -> Table:
    made = table("survives", "up to", "age", "how", right=("age",))
    for row in view.protection:
        if not row.is_known:
            made.add_row(row.against, Text("unknown", style="yellow"), NOTHING, row.why)
        elif row.step is None:
            made.add_row(row.against, Text("no", style="bold red"), NOTHING, row.why)
        else:
            step = Text(f"step {row.step}", style="bold green")
            made.add_row(row.against, step, human_age(row.age_ns), row.why)
    return made


def _period(view: JobView) -> Iterator[Text]:
    """How much a killed process costs where that is more than one step, and why."""
    if view.period_steps > 1:
        period, lost = view.period_steps, at_most_lost_steps(view.period_steps)
        told = (
            f"A capture takes up to {period} steps, so one step in {period} is captured, and a "
            f"killed process costs up to {lost} completed steps."
        )
        yield Text(told, style="yellow")


def _ranks(view: JobView) -> Table:
    numbers = ("rank", "process", "done", "age", "loss")
    made = table(
        "rank", "process", "doing", "done", "newest snapshot", "age", "loss", right=numbers
    )
    for row in view.ranks:
        made.add_row(
            str(row.rank),
            str(row.pid or "-"),
            _doing(row),
            str(row.completed_step),
            "none" if row.newest_step is None else f"step {row.newest_step}",
            human_age(row.newest_age_ns),
            "-" if row.loss is None else f"{row.loss:.5g}",
        )
    return made


def _doing(row: RankRow) -> Text:
    doing = Text(f"{row.phase} of step {row.step}" if row.step >= 0 else row.phase)
    return doing if row.alive else Text.assemble(("gone", "bold red"), " in ", doing)


def _costs(view: JobView) -> Table:
    names = (
        "rank",
        "step",
        "waited",
        "in all",
        "copy",
        "seal",
        "captured",
        "skipped",
        "torn",
        "state",
    )
    made = table(*names, right=names)
    for row in view.ranks:
        speed = "-" if row.copy_bytes_per_s is None else f"{row.copy_bytes_per_s / 1e9:.1f} GB/s"
        made.add_row(
            str(row.rank),
            _took(row.step_ns_last),
            _took(row.stall_ns_last),
            _took(row.stall_ns_total),
            speed,
            _took(row.seal_ns_last),
            str(row.captured_steps),
            str(row.skipped_steps),
            str(row.torn_steps),
            human_bytes(row.payload_bytes),
        )
    return made


def _took(duration_ns: int) -> str:
    return human_ns(duration_ns) if duration_ns else "-"


def _slots(view: JobView) -> Table:
    """Which step is in which slot; the one that all ranks hold in bold."""
    width = max((slot.slot for slot in view.slots), default=-1) + 1
    made = table("rank", *(f"slot {index}" for index in range(width)), right=("rank",))
    for rank in sorted({slot.rank for slot in view.slots}):
        cells = {slot.slot: _cell(slot, view) for slot in view.slots if slot.rank == rank}
        made.add_row(str(rank), *(cells.get(index, NOTHING) for index in range(width)))
    return made


def _cell(slot: SlotRow, view: JobView) -> Text:
    horizon = None if view.horizon is None else (view.horizon.step, view.horizon.epoch)
    style = "" if slot.state == "sealed" else SLOT_COLOURS[slot.state]
    if slot.state == "sealed" and (slot.step, slot.epoch) == horizon:
        style = "bold green"
    return Text(holding(slot), style=style)


def _held(held: Sequence[SlotRow]) -> Iterator[Text]:
    """What is kept here for other nodes."""
    counts = Counter(row.kind for row in held if row.state == "sealed")
    if counts:
        words = " and ".join(
            f"{number} {kind if number == 1 else PLURALS[kind]}" for kind, number in counts.items()
        )
        size = human_bytes(sum(row.payload_bytes for row in held))
        yield Text(f"held for other nodes: {words}, {size}")
