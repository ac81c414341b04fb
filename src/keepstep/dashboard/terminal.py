"""Terminal: views as rich tables, readable at 100 columns.

Comes in: what `view` and `timeline` made. Goes out: renderables. Decides nothing but colour and
width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keepstep.core.economics.goodput import Account
from keepstep.dashboard.finding import Leftover
from keepstep.dashboard.nodes import NodeRow, NodesView
from keepstep.dashboard.timeline import GLAD, Recovery, Story, between_ns, is_trouble
from keepstep.dashboard.view import JobView, SlotRow
from keepstep.model.events import Event
from keepstep.model.units import S_NS, human_bytes, human_ns

STATE_COLOURS = {
    "training": "green",
    "restoring": "yellow",
    "waiting": "yellow",
    "broken": "red",
    "left-over": "yellow",
    "ended": "dim",
}
SLOT_COLOURS = {"sealed": "green", "writing": "yellow", "empty": "dim", "damaged": "bold red"}
LINK_COLOURS = {
    "fact": "red",
    "suspicion": "yellow",
    "verdict": "red",
    "refused": "dim",
    "closed": "green",
}
MAX_SENTENCES, MAX_SENTENCE = 4, 200  # an incident is to fit on a screen
NOTHING = Text("-", style="dim")
# what the leader told longer ago is shown with its age: it speaks when something changes
OLD_NS = 5 * S_NS


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


def clock(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns // S_NS).isoformat(" ")


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `right` hold numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


# -- status


def status(view: JobView) -> RenderableType:
    """Everything about one job."""
    title = Text.assemble(
        (view.job, "bold"), "  ", (view.state, STATE_COLOURS[view.state]), f"  {view.why}"
    )
    if view.job_dir is None:
        stored = view.checkpoint
        return Group(
            title,
            f"newest checkpoint: step {stored.step}, {human_age(stored.age_ns)} old"
            if stored
            else "no checkpoint",
        )
    keeper = "the keeper lives" if view.keeper_alive else Text("no keeper lives", style="yellow")
    place = Text.assemble("memory in ", str(view.job_dir), "; ", keeper)
    about_nodes = [] if view.nodes is None else list(_nodes(view.nodes))
    rest: tuple[RenderableType, ...] = (
        _protection(view),
        _ranks(view),
        _costs(view),
        _slots(view),
        *_held(view.held),
    )
    return Group(
        title,
        place,
        *about_nodes,
        *_incident_now(view),
        *rest,
        *([account(view.account)] if view.account else []),
    )


def _incident_now(view: JobView) -> Iterator[RenderableType]:
    """What has failed and is not back yet."""
    if view.incident is not None:
        began = view.incident.stages[0].event if view.incident.stages else None
        yield Text(
            "Not back yet:" if began is None else f"Not back yet, since {clock(began.wall_ns)}:",
            style="bold yellow",
        )
        yield chain(view.incident, began)


def _nodes(nodes: NodesView) -> Iterator[Text]:
    """Which nodes can be lost right now, in a few lines."""
    if nodes.policy is None:
        yield Text(f"Several nodes: {nodes.doubt}.", style="yellow")
        return
    count = (
        f"{len(nodes.nodes)} nodes"
        if nodes.here is None
        else f"{len(nodes.nodes)} nodes (this is node {nodes.here})"
    )
    step = (
        "no step is held by every rank yet"
        if nodes.step is None
        else f"step {nodes.step} is {'' if nodes.is_committed else 'not yet '}committed"
    )
    if nodes.doubt:
        age = human_age(nodes.told_age_ns)
        yield Text(
            f"{count}, {nodes.policy}: what may be lost is unknown: {nodes.doubt}.", style="yellow"
        )
        yield Text(f"{age} ago: {step}; {nodes.why}.", style="dim")
        return
    verdict = "" if nodes.step is None else f" {nodes.why[:1].upper()}{nodes.why[1:]}."
    yield Text.assemble(
        f"{count}, {nodes.policy}: {step}.",
        (verdict, "green" if (nodes.any_nodes or 0) > 0 else "bold red"),
    )
    for row in (row for row in nodes.nodes if not row.linked):
        yield Text(
            f"Node {row.node} ({row.host}, {_ranks_of(row)}) has no open link to the leading "
            "keeper.",
            style="yellow",
        )
    if (nodes.told_age_ns or 0) > OLD_NS:
        silent = "should the leader have gone since, the keeper here has not noticed yet"
        yield Text(
            f"This was told {human_age(nodes.told_age_ns)} ago and has not changed; {silent}.",
            style="dim",
        )


def _ranks_of(row: NodeRow) -> str:
    first, last = row.ranks[0], row.ranks[-1]
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def _protection(view: JobView) -> Table:
    made = table("survives", "up to", "age", "how", right=("age",))
    for p in view.protection:
        if not p.is_known:
            made.add_row(p.against, Text("unknown", style="yellow"), NOTHING, p.why)
        elif p.step is None:
            made.add_row(p.against, Text("no", style="bold red"), NOTHING, p.why)
        else:
            made.add_row(
                p.against, Text(f"step {p.step}", style="bold green"), human_age(p.age_ns), p.why
            )
    return made


def _ranks(view: JobView) -> Table:
    made = table(
        "rank",
        "process",
        "doing",
        "done",
        "newest snapshot",
        "age",
        "loss",
        right=("rank", "process", "done", "age", "loss"),
    )
    for r in view.ranks:
        doing = Text(f"{r.phase} of step {r.step}" if r.step >= 0 else r.phase)
        if not r.alive:
            doing = Text.assemble(("gone", "bold red"), " in ", doing)
        newest = "none" if r.newest_step is None else f"step {r.newest_step}"
        loss = "-" if r.loss is None else f"{r.loss:.5g}"
        made.add_row(
            str(r.rank),
            str(r.pid or "-"),
            doing,
            str(r.completed_step),
            newest,
            human_age(r.newest_age_ns),
            loss,
        )
    return made


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
    for r in view.ranks:
        speed = "-" if r.copy_bytes_per_s is None else f"{r.copy_bytes_per_s / 1e9:.1f} GB/s"
        times = (_took(ns) for ns in (r.step_ns_last, r.stall_ns_last, r.stall_ns_total))
        counts = (str(r.captured_steps), str(r.skipped_steps), str(r.torn_steps))
        made.add_row(
            str(r.rank), *times, speed, _took(r.seal_ns_last), *counts, human_bytes(r.payload_bytes)
        )
    return made


def _took(duration_ns: int) -> str:
    return human_ns(duration_ns) if duration_ns else "-"


def _held(held: Sequence[SlotRow]) -> Iterator[Text]:
    """What rests here for other nodes."""
    counts = Counter(row.kind for row in held if row.state == "sealed")
    if counts:
        plural = {"copy": "copies", "parity": "parities"}
        words = " and ".join(
            f"{count} {kind if count == 1 else plural[kind]}" for kind, count in counts.items()
        )
        yield Text(
            f"held for other nodes: {words}, {human_bytes(sum(row.payload_bytes for row in held))}"
        )


def _slots(view: JobView) -> Table:
    """Which step lies in which slot, the one all ranks hold in bold."""
    width = max((s.slot for s in view.slots), default=-1) + 1
    made = table("rank", *(f"slot {i}" for i in range(width)), right=("rank",))
    for rank in sorted({s.rank for s in view.slots}):
        cells = {s.slot: _cell(s, view) for s in view.slots if s.rank == rank}
        made.add_row(str(rank), *(cells.get(i, NOTHING) for i in range(width)))
    return made


def holding(slot: SlotRow) -> str:
    """What a slot holds, in words."""
    return {"sealed": f"step {slot.step}", "writing": f"step {slot.step}, unsealed"}.get(
        slot.state, slot.state
    )


def _cell(slot: SlotRow, view: JobView) -> Text:
    words = holding(slot)
    common = (
        view.horizon is not None
        and slot.state == "sealed"
        and (slot.step, slot.epoch) == (view.horizon.step, view.horizon.epoch)
    )
    return Text(
        words,
        style="bold green"
        if common
        else SLOT_COLOURS[slot.state]
        if slot.state != "sealed"
        else "",
    )


# -- explain


def story(job: str, number: int, count: int, told: Story) -> RenderableType:
    """One run: its recoveries, then every event."""
    first = told.events[0]
    end = (
        Text("it goes on", style="green")
        if told.end is None
        else Text(f"over: {told.end}", style="green" if told.ended_well else "red")
    )
    failures = f"{len(told.recoveries)} failure{'' if len(told.recoveries) == 1 else 's'}"
    resumed = sum(r.outcome == "resumed" for r in told.recoveries)
    outcome = (
        f"{failures}, {resumed} recovered, {_lost(told.lost_steps)}"
        if told.recoveries
        else "no failure"
    )
    title = Text.assemble(
        (job, "bold"), f"  run {number} of {count}, begun {clock(first.wall_ns)}: {outcome}; ", end
    )
    return Group(
        title, *(_recovery(i, r, told) for i, r in enumerate(told.recoveries, 1)), _timeline(told)
    )


def _recovery(number: int, recovery: Recovery, told: Story) -> RenderableType:
    took = human_ns(recovery.took_ns)
    if recovery.outcome == "resumed":
        source = (
            "a fresh start"
            if recovery.source == "fresh"
            else f"step {recovery.step} from {recovery.source}"
        )
        title = Text(
            f"Recovery {number}: resumed with {source} in {took}, "
            f"{_lost(recovery.lost_steps or 0)}",
            style="bold green",
        )
    elif recovery.outcome == "ended":
        title = Text(f"Failure {number}: the job ended {took} later", style="bold red")
    else:
        title = Text(f"Failure {number}: nothing has resumed yet", style="bold yellow")
    return Group("", title, chain(recovery, told.events[0]))


def chain(recovery: Recovery, began: Event | None) -> RenderableType:
    """Link by link: at which time since `began`, how long after the link before, and why."""
    made = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for justify in ("left", "left", "right", "right"):
        made.add_column(justify=justify, no_wrap=True)
    made.add_column(overflow="fold")
    before = ""
    for stage in recovery.stages:
        at = "" if began is None else f"at {_seconds(between_ns(began, stage.event))}"
        link, before = ("" if stage.link == before else stage.link), stage.link
        why = _short(stage.event.why)
        said = Text(
            f"{len(stage.who)} say so, the last: {why}" if len(stage.who) > 1 else why,
            style=LINK_COLOURS.get(stage.link, ""),
        )
        made.add_row(Text(link, style="bold"), stage.name, at, f"+{human_ns(stage.took_ns)}", said)
    for label, sentences in (
        ("refused", recovery.refused),
        ("setback", recovery.setbacks),
        ("evidence", recovery.evidence),
    ):
        for why in sentences[:MAX_SENTENCES]:
            made.add_row(
                Text(label, style="red"),
                "",
                "",
                "",
                Text(why if label == "evidence" else _short(why), style="red"),
            )
        if len(sentences) > MAX_SENTENCES:
            made.add_row("", "", "", "", f"and {len(sentences) - MAX_SENTENCES} more")
    return Padding(made, (0, 0, 0, 2))


def _short(why: str) -> str:
    """The timeline has the whole sentence."""
    return why if len(why) <= MAX_SENTENCE else f"{why[: MAX_SENTENCE - 3]}..."


def _lost(steps: int) -> str:
    return "1 completed step lost" if steps == 1 else f"{steps} completed steps lost"


def _timeline(told: Story) -> Table:
    made = table("time", "who", "what and why", right=("time",))
    for event, who, why in _folded(told.events):
        style = "red" if is_trouble(event) else "green" if event.kind in GLAD else ""
        made.add_row(_seconds(between_ns(told.events[0], event)), who, Text(why, style=style))
    return made


def _folded(events: Sequence[Event]) -> Iterator[tuple[Event, str, str]]:
    """What people read: checkpoints in a row become one line, and so do ranks that say the same.
    `--json` has every event."""
    for is_persist, group in groupby(events, lambda e: e.kind in ("persist-started", "persisted")):
        members = list(group)
        written = [e for e in members if e.kind == "persisted"]
        if is_persist and len(written) > 1:
            steps = (
                f"{len(written)} checkpoints, steps {written[0].data['step']} to "
                f"{written[-1].data['step']}"
            )
            yield written[-1], written[-1].who, f"{steps}; the last one: {written[-1].why}"
            continue
        for _, same in groupby(members, lambda e: (e.kind, e.why)):
            said = list(same)
            yield said[0], ", ".join(dict.fromkeys(e.who for e in said)), said[0].why


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / S_NS:.3f} s"


# -- where the time went

PART_WORDS = {
    "productive": "steps that count",
    "stalled": "the trainer waited for fault tolerance",
    "redone": "steps done once more",
    "detecting": "from a fault until it was noticed",
    "recovering": "until all ranks trained again",
    "starting": "before the first step",
    "idle": "nothing ran, or nobody said so",
}


def account(spent: Account) -> RenderableType:
    """Part by part, with shares that sum to 100 %."""
    if spent.goodput_ratio is None:
        return Text("")
    made = table("where the time went", "time", "share", "", right=("time", "share"))
    parts = spent.parts()
    for (name, ns), tenths in zip(parts.items(), shares(list(parts.values()), 1000), strict=True):
        if ns:
            style = (
                "green"
                if name == "productive"
                else "yellow"
                if name in ("detecting", "recovering", "redone")
                else ""
            )
            made.add_row(
                Text(name, style=style), _span(ns), f"{tenths / 10:.1f} %", PART_WORDS[name]
            )
    made.add_row("in all", _span(spent.wall_ns), "100.0 %", "", style="bold")
    return made


def shares(amounts: Sequence[int], whole: int) -> list[int]:
    """`whole` divided as `amounts` are, in whole numbers that sum to it: what rounding leaves goes
    to the largest remainders."""
    total = sum(amounts)
    floors = [amount * whole // total for amount in amounts]
    by_remainder = sorted(range(len(amounts)), key=lambda i: (-(amounts[i] * whole % total), i))
    for i in by_remainder[: whole - sum(floors)]:
        floors[i] += 1
    return floors


def _span(duration_ns: int) -> str:
    return human_ns(duration_ns) if duration_ns < 120 * S_NS else human_age(duration_ns)


# -- clean


def leftovers(found: Sequence[Leftover]) -> Table:
    """Job directories, how large, and who holds them."""
    made = table(
        "job", "size", "for other nodes", "held by", "where", right=("size", "for other nodes")
    )
    for leftover in found:
        who = Text(holders(leftover), style="green" if leftover.alive else "yellow")
        held = human_bytes(leftover.held_bytes) if leftover.held_bytes else "-"
        made.add_row(leftover.job, human_bytes(leftover.bytes), held, who, str(leftover.path))
    return made


def holders(leftover: Leftover) -> str:
    """Who lives there, in words."""
    names = [f"rank {rank} (process {pid})" for rank, pid in leftover.ranks_alive]
    if leftover.keeper_alive:
        names.append("the keeper")
    return ", ".join(names) or "nobody"
