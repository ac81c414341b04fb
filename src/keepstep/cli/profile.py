"""`keepstep profile`: when the network of a running job is idle, and which of the copies' bytes go
where.

Reads the pages of the ranks on this node; starts nothing and disturbs nobody. As JSON: a
`dashboard.rhythm.RhythmView` field by field, and "job": `ranks` (profile null before there is one),
`idle` ([begin, end] of what all ranks leave, ns into the step), `told` (what the node's keeper has
measured; null when it has told nothing) and `plan` (null likewise).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepstep.cli import figures
from keepstep.cli.figures import Strip
from keepstep.cli.job_choice import JobOption, JsonOption, print_json, with_memory
from keepstep.core.pacing.step_profile import Profile
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.rhythm import RhythmView, rhythm_view
from keepstep.errors import ConfigError
from keepstep.model.units import S_NS, human_bytes, human_ns

BUSY = figures.BLUE
IDLE = "#e8edf3"
CHUNK = figures.AMBER
TICKS = 5

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def profile(
    job: JobOption = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it: .svg, .html or .png.", dir_okay=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show when a running job leaves the network idle, and which copies go there."""
    if plot is not None:
        figures.check(plot)
    found = next(iter(with_memory(job)), None)
    if found is None:
        raise ConfigError("--job: expected a job that holds memory here, found none")
    view = rhythm_view(found.job_dir)
    if not view.ranks:
        raise ConfigError(
            f"--job: expected ranks of {found.name!r} that tell of their collectives, found "
            "none: they do so in a job of several nodes, "
            "with groups made by keepstep.init_process_group, unless interleave is off"
        )
    if plot is not None:
        figures.save(_drawn(found, view), plot, f"keepstep profile {found.name}")
    if json:
        print_json(
            {
                "job": found.name,
                **{name: getattr(view, name) for name in RhythmView.__dataclass_fields__},
            }
        )
    else:
        _show(found, view)


def _show(found: FoundJob, view: RhythmView) -> None:
    console = Console(highlight=False)
    console.print(Text(found.name, style="bold"))
    width = max(20, min(console.width, 120) - 10)
    for rank in view.ranks:
        if rank.profile is None:
            console.print(Text(f"rank {rank.rank:<4} {rank.why}"), soft_wrap=True)
        else:
            console.print(Text(f"rank {rank.rank:<4} "), _bar(rank.profile, width), sep="")
    if view.plan is not None:
        console.print(Text("copies    "), _chunk_bar(view, width), sep="")
    if view.step_ns:
        console.print(Text(f"          0{human_ns(view.step_ns):>{width - 1}}", style="dim"))
        console.print(Text("          \u2588 collectives  \u00b7 idle  \u2593 copies", style="dim"))
    if view.plan is not None:
        console.print(_table(view))
    for line in _sentences(view):
        console.print(Text(line), soft_wrap=True)


def _bar(found: Profile, width: int) -> Text:
    return _painted(
        [(s.began_ns, s.ended_ns) for s in found.spans], found.step_ns, width, "\u2588", "\u00b7"
    )


def _chunk_bar(view: RhythmView, width: int) -> Text:
    assert view.plan is not None
    used = [
        (begin, min(end, begin + used_ns))
        for (begin, end), used_ns in zip(view.idle, view.plan.used_ns, strict=False)
    ]
    return _painted(used, view.step_ns, width, " ", "\u2593")


def _painted(
    spans: list[tuple[int, int]], step_ns: int, width: int, outside: str, inside: str
) -> Text:
    cells = [outside] * width
    for begin, end in spans:
        for cell in range(
            round(begin * width / step_ns), min(width, max(round(end * width / step_ns), 0))
        ):
            cells[cell] = inside
    return Text("".join(cells))


def _table(view: RhythmView) -> Table:
    assert view.plan is not None
    many = Counter(chunk.span for chunk in view.plan.chunks)
    nbytes = Counter[int]()
    for chunk in view.plan.chunks:
        nbytes[chunk.span] += chunk.nbytes
    table = Table(
        "idle from",
        "for",
        "counted on",
        "chunks",
        "bytes",
        "left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for index, (begin, end) in enumerate(view.idle):
        left_ns = view.plan.budget_ns[index] - view.plan.used_ns[index]
        left = human_ns(left_ns) if left_ns >= 0 else f"{human_ns(-left_ns)} too little"
        counted = human_ns(view.plan.budget_ns[index])
        table.add_row(
            human_ns(begin),
            human_ns(end - begin),
            counted,
            str(many[index]),
            human_bytes(nbytes[index]),
            left,
        )
    return table


def _sentences(view: RhythmView) -> list[str]:
    lines = [f"rank {rank.rank}: {rank.why}" for rank in view.ranks if rank.profile is not None][:1]
    if view.told is None:
        return [
            *lines,
            "The node's keeper has planned nothing: it has sent no copies yet, or has not "
            "seen enough steps.",
        ]
    told = view.told
    lines.append(
        f"The link: {human_ns(told.alpha_ns)} and {human_bytes(told.bytes_per_s)}/s; chunks "
        f"of at most {human_bytes(told.chunk_bytes)}, "
        f"{human_bytes(told.reserve_bytes)} under way at most."
    )
    if view.plan is not None:
        lines.append(f"Planned: {view.plan.why}.")
    state = (
        f"Copies are not interleaved: {told.open_because}."
        if told.open_because
        else "Copies go where the network is idle."
    )
    late = (
        f" {told.late} blocks were held back for so long that they went all the same."
        if told.late
        else ""
    )
    return [*lines, state + late]


def _drawn(found: FoundJob, view: RhythmView) -> Figure:
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


def _chunks(view: RhythmView) -> list[tuple[float, float]]:
    """When each chunk goes, and how long it takes by what is known of the link."""
    if view.plan is None or view.told is None:
        return []
    chunks = []
    for chunk in view.plan.chunks:
        begin = view.idle[chunk.span][0] if view.idle else 0
        length_ns = view.told.alpha_ns + chunk.nbytes * S_NS / view.told.bytes_per_s
        chunks.append((float(begin + chunk.at_ns), length_ns))
    return chunks
