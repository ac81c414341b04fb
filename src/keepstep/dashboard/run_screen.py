"""The screen of `keepstep explain`: a run's failures link by link, then every event.

Comes in: a `JobRun`. Goes out: rich renderables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keepstep.dashboard.ages import clock
from keepstep.dashboard.sentences import (
    Said,
    lines,
    recovery_title,
    remarks,
    run_end,
    run_outcome,
    stage_words,
)
from keepstep.dashboard.terminal import STYLES, table, text
from keepstep.dashboard.timeline import JobRun, RecoveryChain, between_ns
from keepstep.model.events import Event
from keepstep.model.units import S_NS, human_ns

WIDE_COLUMNS = 100  # from there on the chain's links have a column, too


def run_screen(
    job: str, number: int, runs: int, run: JobRun, is_alive: bool | None = None
) -> RenderableType:
    """One run, the `number`th of `runs`: its recoveries, then every event. `is_alive`: see
    `run_end`."""
    recoveries = (
        _recovery(index, recovery, run) for index, recovery in enumerate(run.recoveries, 1)
    )
    return Group(_title(job, number, runs, run, is_alive), *recoveries, _timeline(run))


def _title(job: str, number: int, runs: int, run: JobRun, is_alive: bool | None) -> Text:
    end = run_end(run, is_alive)
    begun = clock(run.events[0].wall_ns)
    words = f"  run {number} of {runs}, begun {begun}: {run_outcome(run)}; "
    return Text.assemble((job, "bold"), words, (end.text, STYLES[end.tone]))


def _recovery(number: int, recovery: RecoveryChain, run: JobRun) -> RenderableType:
    told = recovery_title(number, recovery)
    title = Text(told.text, style=f"bold {STYLES[told.tone]}")
    return Group("", title, chain(recovery, run.events[0]))


def chain(recovery: RecoveryChain, began: Event | None) -> RenderableType:
    """Link by link: at which time since `began`, how long after the link before, and why."""
    return Padding(_Chain(recovery, began), (0, 0, 0, 2))


class _Chain:
    """Draws itself by the room there is: on a narrow terminal the sentences get it."""

    def __init__(self, recovery: RecoveryChain, began: Event | None) -> None:
        self._recovery, self._began = recovery, began

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        has_links = options.max_width >= WIDE_COLUMNS
        made = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        for justify in (*(["left"] if has_links else []), "left", "right", "right"):
            made.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
        made.add_column(overflow="fold")
        for cells in self._rows():
            made.add_row(*(cells if has_links else cells[1:]))
        for label, why in remarks(self._recovery):
            style = STYLES["bad"] if label else ""
            named: list[RenderableType] = [Text(label, style=style), *([""] if has_links else [])]
            made.add_row(*named, "", "", Text(why, style=style))
        yield made

    def _rows(self) -> Iterator[tuple[RenderableType, ...]]:
        before, told = "", list[str]()
        for index, stage in enumerate(self._recovery.stages):
            link = "" if stage.link == before else stage.link
            before = stage.link
            since = self._began
            at = "" if since is None else f"at {_seconds(between_ns(since, stage.event))}"
            took = f"+{human_ns(stage.took_ns)}" if index else ""
            said = stage_words(stage)
            words = Text(_new_in(said.text, told), style=STYLES[said.tone])
            told.append(said.text)
            yield Text(link, style="bold"), stage.name, at, took, words


def _new_in(sentence: str, told: Sequence[str]) -> str:
    """Without what a link before has said in the same words."""
    for before in told:
        if sentence.startswith(f"{before}; "):
            return sentence.removeprefix(f"{before}; ")
    return sentence


def _timeline(run: JobRun) -> Table:
    made = table("time", "who", "what and why", right=("time",))
    for line in lines(run.events):
        at = _seconds(between_ns(run.events[0], line.event))
        made.add_row(at, line.who, text(Said(line.why, line.tone)))
    return made


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / S_NS:.3f} s"
