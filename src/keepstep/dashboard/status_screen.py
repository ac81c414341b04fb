"""The screen of `keepstep status`: what is protected, what has failed and is not back yet, who does
what, where the time went.

Comes in: a `JobView`. Goes out: rich renderables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from keepstep.dashboard.account_table import account_table
from keepstep.dashboard.ages import clock, human_age
from keepstep.dashboard.nodes import NodesView
from keepstep.dashboard.parts import PartRow
from keepstep.dashboard.run_screen import chain
from keepstep.dashboard.sentences import (
    STATE_TONES,
    held_words,
    holding,
    keeper_words,
    nodes_words,
    old_report_words,
    period_words,
)
from keepstep.dashboard.slots import SlotRow
from keepstep.dashboard.slowness import LOUD, doubt_words
from keepstep.dashboard.terminal import NOTHING, SLOT_COLOURS, STYLES, table, text
from keepstep.dashboard.view import JobView, RankRow
from keepstep.model.parts import PartState
from keepstep.model.units import counted, first_names, human_bytes, human_ns

SHOWN_RANKS = 32  # nobody reads more rows than that, and a thousand take a second to draw


def status_screen(view: JobView, is_whole: bool = False) -> RenderableType:
    """What a person looks for first about one job; is_whole: and what each rank's steps cost, and
    which slot holds what. Damaged slots are shown in any case."""
    state = (view.state, STYLES[STATE_TONES[view.state]])
    title = Text.assemble((view.job, "bold"), "  ", state, f"  {view.why}")
    if view.job_dir is None:
        return Group(title, _checkpoint(view))
    shown = _shown(view.ranks)
    return Group(
        title,
        _place(view),
        *(_nodes(view.nodes) if view.nodes is not None else []),
        *_incident(view),
        *_slow(view),
        *_parts(view.parts),
        _protection(view),
        *_period(view),
        *_left_out(view.ranks, shown),
        *([_ranks(shown)] if shown else []),
        *(_costs(shown) if is_whole else _cost_words(view.ranks)),
        *_slots_shown(view, shown, is_whole),
        *_held(view.held),
        *([account_table(view.account)] if view.account else []),
    )


def _checkpoint(view: JobView) -> str:
    stored = view.checkpoint
    if stored is None:
        return "no checkpoint"
    return f"newest checkpoint: step {stored.step}, {human_age(stored.age_ns)} old"


def _place(view: JobView) -> Text:
    keeper = keeper_words(view.keeper_alive)
    return Text.assemble("memory in ", str(view.job_dir), "; ", (keeper.text, STYLES[keeper.tone]))


def _incident(view: JobView) -> Iterator[RenderableType]:
    """What has failed and is not back yet."""
    if view.incident is None:
        return
    began = view.incident.stages[0].event if view.incident.stages else None
    since = "" if began is None else f" since {clock(began.wall_ns)}"
    # without a rank somebody has to start one first, maybe the user
    word = "Not training" if view.state == "waiting" else "Recovering"
    yield Text(f"{word}{since}:", style="bold yellow")
    yield chain(view.incident, began)


def _slow(view: JobView) -> Iterator[Text]:
    """Who holds the others up, which links do, and what nobody can tell."""
    for row in view.slow:
        yield Text(f"Slow, told {human_age(row.age_ns)} ago: {row.why}.", style="yellow")
        if row.detail:
            yield Text(f"{row.detail}.", style="dim")
        if row.confirmed_why:
            yield Text(f"Of its processor: {row.confirmed_why}.", style="yellow")
    for doubt in view.doubts:
        yield Text(doubt_words(doubt), style="yellow" if doubt.doubt in LOUD else "dim")
    for link in view.links.slow:
        yield Text(f"Slow link, told {human_age(link.age_ns)} ago: {link.why}.", style="yellow")
    for damage in view.links.damages:
        yield Text(f"Damage, told {human_age(damage.age_ns)} ago: {damage.why}.", style="yellow")


def _parts(parts: Sequence[PartRow]) -> Iterator[Text]:
    """What of the machine is sick; what nobody knows of; how many are well."""
    for row in parts:
        if row.health == PartState.BAD.value:
            yield Text(f"Sick: {row.part}: {row.why}; cheapest: {row.fix}.", style="yellow")
    unknown = [row for row in parts if row.health == PartState.UNKNOWN.value]
    for why in dict.fromkeys(row.why for row in unknown):
        named = first_names([row.part for row in unknown if row.why == why])
        yield Text(f"Unknown: {named}: {why}.", style="dim")
    if parts:
        count = sum(row.health == PartState.OK.value for row in parts)
        yield Text(f"{count} of {counted(len(parts), 'part')} of this machine are well.")


def _nodes(nodes: NodesView) -> Iterator[Text]:
    """Which nodes may be lost right now, in a few lines."""
    for line in nodes_words(nodes):
        yield Text.assemble(*map(text, line))
    old = old_report_words(nodes)
    if old is not None:
        yield text(old)


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
    said = period_words(view.period_steps)
    if said is not None:
        yield text(said)


def _shown(ranks: Sequence[RankRow]) -> Sequence[RankRow]:
    """Those that a person looks for: who is gone, who is behind."""
    if len(ranks) <= SHOWN_RANKS:
        return ranks
    by_trouble = sorted(
        ranks,
        key=lambda row: (
            row.alive,
            row.completed_step,
            -1 if row.newest_step is None else row.newest_step,
            row.rank,
        ),
    )
    return sorted(by_trouble[:SHOWN_RANKS], key=lambda row: row.rank)


def _left_out(ranks: Sequence[RankRow], shown: Sequence[RankRow]) -> Iterator[Text]:
    if len(shown) < len(ranks):
        told = (
            f"{len(shown)} of {len(ranks)} ranks, those first that are gone or furthest behind; "
            "--json has all."
        )
        yield Text(told, style="dim")


def _ranks(ranks: Sequence[RankRow]) -> Table:
    numbers = ("rank", "process", "done", "age", "loss")
    made = table(
        "rank", "process", "doing", "done", "newest snapshot", "age", "loss", right=numbers
    )
    for row in ranks:
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


def _costs(ranks: Sequence[RankRow]) -> Iterator[Table]:
    """What keepstep costs each rank."""
    if ranks:
        yield _times(ranks)
        yield _counts(ranks)


def _cost_words(ranks: Sequence[RankRow]) -> Iterator[Text]:
    """What keepstep costs, in a line."""
    slowest = max(ranks, key=lambda row: row.step_ns_last, default=None)
    if slowest is None or slowest.step_ns_last == 0:
        return
    wait = human_ns(slowest.stall_ns_last)
    ratio = slowest.stall_ns_last / slowest.step_ns_last
    captured, skipped, torn = (
        sum(counts)
        for counts in zip(
            *((row.captured_steps, row.skipped_steps, row.torn_steps) for row in ranks),
            strict=True,
        )
    )
    yield Text(
        f"The last step took {human_ns(slowest.step_ns_last)} on the slowest rank, {wait} "
        f"({ratio:.1%}) of it waiting for keepstep. {counted(captured, 'snapshot')}, {skipped} "
        f"skipped, {torn} torn. -v has each rank's, and the slots."
    )


def _times(ranks: Sequence[RankRow]) -> Table:
    names = ("rank", "step", "waited", "in all", "copy", "seal")
    made = table(*names, right=names)
    for row in ranks:
        speed = "-" if row.copy_bytes_per_s is None else f"{row.copy_bytes_per_s / 1e9:.1f} GB/s"
        made.add_row(
            str(row.rank),
            _took(row.step_ns_last),
            _took(row.stall_ns_last),
            _took(row.stall_ns_total),
            speed,
            _took(row.seal_ns_last),
        )
    return made


def _counts(ranks: Sequence[RankRow]) -> Table:
    names = ("rank", "captured", "skipped", "torn")
    made = table(*names, "state", right=names)
    for row in ranks:
        counts = row.captured_steps, row.skipped_steps, row.torn_steps
        made.add_row(str(row.rank), *map(str, counts), _size(row))
    return made


def _is_damaged(view: JobView) -> bool:
    return any(slot.state == "damaged" for slot in view.slots)


def _size(row: RankRow) -> str:
    whole = human_bytes(row.payload_bytes)
    is_shared = 0 < row.kept_bytes < row.payload_bytes
    return f"{whole}, keeps {human_bytes(row.kept_bytes)}" if is_shared else whole


def _took(duration_ns: int) -> str:
    return human_ns(duration_ns) if duration_ns else "-"


def _slots_shown(view: JobView, shown: Sequence[RankRow], is_whole: bool) -> Iterator[Table]:
    if view.slots and (is_whole or _is_damaged(view)):
        yield _slots(view, {row.rank for row in shown})


def _slots(view: JobView, shown: Collection[int]) -> Table:
    """Which step is in which slot of these ranks, and of those that have no page; the one that all
    ranks hold in bold."""
    width = max((slot.slot for slot in view.slots), default=-1) + 1
    made = table("rank", *(f"slot {index}" for index in range(width)), right=("rank",))
    left_out = {row.rank for row in view.ranks}.difference(shown)
    of_rank: dict[int, dict[int, Text]] = {}
    for slot in view.slots:
        if slot.rank not in left_out:
            of_rank.setdefault(slot.rank, {})[slot.slot] = _cell(slot, view)
    for rank, cells in sorted(of_rank.items()):
        made.add_row(str(rank), *(cells.get(index, NOTHING) for index in range(width)))
    return made


def _cell(slot: SlotRow, view: JobView) -> Text:
    horizon = None if view.horizon is None else (view.horizon.step, view.horizon.epoch)
    style = "" if slot.state == "sealed" else SLOT_COLOURS[slot.state]
    if slot.state == "sealed" and (slot.step, slot.epoch) == horizon:
        style = "bold green"
    return Text(holding(slot), style=style)


def _held(held: Sequence[SlotRow]) -> Iterator[Text]:
    words = held_words(held)
    if words is not None:
        yield Text(words)
