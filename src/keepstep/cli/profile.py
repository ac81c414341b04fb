"""`keepstep profile`: when the network of a running job is idle, and which copies go there.

Reads the pages of the ranks on this node; starts nothing and disturbs nobody. As JSON: a
`dashboard.collective_profiles.NetworkView` field by field, and "job": `ranks` (profile null before
there is one), `idle` ([begin, end] of what all ranks leave, ns into the step), `told` (what the
node's keeper has measured; null before it has) and `plan` (null likewise).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

from rich import box
from rich.table import Table
from rich.text import Text

from keepstep.cli import figures
from keepstep.cli.figures import PlotOption, Strip
from keepstep.cli.job_choice import JsonOption, job_option, print_json, with_memory
from keepstep.core.pacing.schedule import Plan
from keepstep.core.pacing.step_profile import Profile
from keepstep.dashboard.collective_profiles import NetworkView, network_view, network_words
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.screen import Screen
from keepstep.errors import ConfigError
from keepstep.model.units import S_NS, human_bytes, human_ns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUSY = figures.BLUE
IDLE = "#e8edf3"
CHUNK = figures.AMBER
TICKS = 5
COLLECTIVE_CELL = "\u2588"
IDLE_CELL = "\u00b7"
COPY_CELL = "\u2593"
LABEL_COLUMNS = 10
MAX_COLUMNS = 120


def profile(
    job: Annotated[str | None, job_option("the newest that has memory")] = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Show when a running job leaves the network idle, and which copies to other nodes go there."""
    if plot is not None:
        figures.check(plot)
    found, view = _seen(job)
    if plot is not None:
        figures.save(_drawn(found, view), plot, f"keepstep profile {found.name}")
    if json:
        values = {f.name: getattr(view, f.name) for f in fields(NetworkView)}
        print_json({"job": found.name, **values})
    else:
        _show(found, view)


def _seen(name: str | None) -> tuple[FoundJob, NetworkView]:
    found = next(iter(with_memory(name)), None)
    if found is None:
        raise ConfigError("--job: expected a job that has memory here, found none")
    view = network_view(found.job_dir)
    if not view.ranks:
        raise ConfigError(
            f"--job: expected ranks of {found.name!r} that record their collectives, found none: "
            "they do in a job of several nodes whose groups are made by "
            "keepstep.init_process_group, unless interleave is off"
        )
    return found, view


def _show(found: FoundJob, view: NetworkView) -> None:
    console = Screen(highlight=False)
    console.print(Text(found.name, style="bold"))
    width = max(20, min(console.width, MAX_COLUMNS) - LABEL_COLUMNS)
    for line in _picture(view, width):
        console.print(line, soft_wrap=True)
    if view.plan is not None:
        console.print(_table(view, view.plan))
    for sentence in network_words(view):
        console.print(Text(sentence), soft_wrap=True)


def _picture(view: NetworkView, width: int) -> Iterator[Text]:
    """A step as a strip for each rank, and one for the copies."""
    for rank in view.ranks:
        label = f"rank {rank.rank:<4} "
        if rank.profile is None:
            yield Text(f"{label}{rank.why}")
        else:
            yield Text(label).append(_strip(rank.profile, width))
    margin = " " * LABEL_COLUMNS
    if view.plan is not None:
        yield Text(f"{'copies':<{LABEL_COLUMNS}}").append(_copies(view, view.plan, width))
    if view.step_ns:
        yield Text(f"{margin}0{human_ns(view.step_ns):>{width - 1}}", style="dim")
        legend = f"{COLLECTIVE_CELL} collectives  {IDLE_CELL} idle  {COPY_CELL} copies"
        yield Text(f"{margin}{legend}", style="dim")


def _strip(found: Profile, width: int) -> str:
    idle = [(span.began_ns, span.ended_ns) for span in found.spans]
    return _painted(idle, found.step_ns, width, COLLECTIVE_CELL, IDLE_CELL)


def _copies(view: NetworkView, plan: Plan, width: int) -> str:
    used = [
        (begin, min(end, begin + used_ns))
        for (begin, end), used_ns in zip(view.idle, plan.used_ns, strict=False)
    ]
    return _painted(used, view.step_ns, width, " ", COPY_CELL)


def _painted(
    spans: list[tuple[int, int]], step_ns: int, width: int, outside: str, inside: str
) -> str:
    """A step as `width` characters."""
    cells = [outside] * width
    for begin, end in spans:
        last = max(round(end * width / step_ns), 0)
        for cell in range(round(begin * width / step_ns), min(width, last)):
            cells[cell] = inside
    return "".join(cells)


def _table(view: NetworkView, plan: Plan) -> Table:
    many = Counter(chunk.span for chunk in plan.chunks)
    nbytes = Counter[int]()
    for chunk in plan.chunks:
        nbytes[chunk.span] += chunk.nbytes
    names = ("idle from", "for", "counted on", "chunks", "bytes", "left")
    table = Table(*names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, (begin, end) in enumerate(view.idle):
        left_ns = plan.budget_ns[index] - plan.used_ns[index]
        table.add_row(
            human_ns(begin),
            human_ns(end - begin),
            human_ns(plan.budget_ns[index]),
            str(many[index]),
            human_bytes(nbytes[index]),
            human_ns(left_ns) if left_ns >= 0 else f"{human_ns(-left_ns)} too little",
        )
    return table


def _drawn(found: FoundJob, view: NetworkView) -> Figure:
    """A strip for each rank, and one for the copies: collectives, idle spans, chunks."""
    rows = [
        Strip(f"rank {rank.rank}", _spans(rank.profile))
        for rank in view.ranks
        if rank.profile is not None
    ]
    ticks = [view.step_ns * tick / TICKS for tick in range(TICKS + 1)]
    return figures.strips(
        f"A step of {found.name}: {human_ns(view.step_ns)}",
        view.plan.why if view.plan is not None else "no copies are planned yet",
        (("collectives", BUSY), ("idle", IDLE), ("copies", CHUNK)),
        [*rows, Strip("copies", [(CHUNK, _chunks(view))])],
        [(tick, human_ns(round(tick))) for tick in ticks],
    )


def _spans(found: Profile) -> list[tuple[str, list[tuple[float, float]]]]:
    idle = [(float(span.began_ns), float(span.length_ns)) for span in found.spans]
    return [(BUSY, [(0.0, float(found.step_ns))]), (IDLE, idle)]


def _chunks(view: NetworkView) -> list[tuple[float, float]]:
    """When each chunk goes, and how long it takes by what is known of the link."""
    if view.plan is None or view.told is None:
        return []
    chunks = []
    for chunk in view.plan.chunks:
        begin = view.idle[chunk.span][0] if view.idle else 0
        length_ns = view.told.alpha_ns + chunk.nbytes * S_NS / view.told.bytes_per_s
        chunks.append((float(begin + chunk.at_ns), length_ns))
    return chunks
