"""Figures for a slide, drawn by matplotlib: bars that say where time goes, lines, strips of spans.

Comes in: names and numbers. Goes out: a file: SVG, PNG, or a page of HTML that holds the SVG and
needs nothing else. Computes none of the numbers it shows.

The colours are Okabe and Ito's, which people who do not see all colours can tell apart.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepstep.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw a figure: .svg, .html or .png. Needs keepstep\\[plot].",
        dir_okay=False,
    ),
]
INK = "#1b1f24"
PALE = "#5c6670"
GRID = "#dfe3e8"
BLUE = "#0072b2"
VERMILION = "#d55e00"
GREEN = "#009e73"
AMBER = "#e69f00"
SKY = "#56b4e9"
PURPLE = "#cc79a7"
SERIES = ((BLUE, "o"), (VERMILION, "s"), (GREEN, "^"), (PURPLE, "D"), (AMBER, "v"), (SKY, "P"))
SHARES = (
    ("useful", BLUE),
    ("redone", VERMILION),
    ("waiting for recovery", AMBER),
    ("held up by saving", SKY),
)
SUFFIXES = (".svg", ".html", ".png")
WIDTH_INCHES = 10.0
SUBTITLE_INCHES = 0.5  # from the top to its baseline
MARGIN = 0.012  # of the width
PAD_INCHES = 0.1
PNG_DOTS_PER_INCH = 200
# Text stays text, and the same numbers make the same file.
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "keepstep",
    "font.size": 10,
    "text.parse_math": False,
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of `bars`. `shares`: of `SHARES`, together 1. `low`, `high`: the confidence interval of
    the first."""

    name: str
    shares: tuple[float, float, float, float]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Strip:
    """A row of `strips`: for each colour, spans as (begin, length)."""

    name: str
    spans: Sequence[tuple[str, Sequence[tuple[float, float]]]]


def check(path: Path) -> None:
    """Before anything is computed for it: can this file be made? Raises ConfigError."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"--plot: expected a file that ends in {', '.join(SUFFIXES)}, found {str(path)!r}"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: expected a directory, found no {str(path.parent)!r}")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError(
            "--plot: expected matplotlib, found none: pip install 'keepstep[plot]'"
        ) from error


def bars(title: str, subtitle: str, rows: Sequence[Bar]) -> Figure:
    """Where the time goes: for each row a bar from 0 to 100 %, with a whisker where its first share
    ends."""
    figure, axes = _framed(title, subtitle, 1.6 + 0.42 * len(rows))
    places = range(len(rows))
    left = [0.0] * len(rows)
    for number, (name, colour) in enumerate(SHARES):
        widths = [row.shares[number] for row in rows]
        axes.barh(places, widths, 0.62, left, label=name, color=colour, edgecolor="white")
        left = [before + width for before, width in zip(left, widths, strict=True)]
    for at, row in zip(places, rows, strict=True):
        ends = [row.shares[0] - row.low], [row.high - row.shares[0]]
        axes.errorbar(row.shares[0], at, xerr=ends, color=INK, capsize=4)
        axes.text(1.012, at, f"{row.shares[0]:.1%}", va="center", weight="bold", color=INK)
    axes.set_yticks(places, [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(_percent())
    axes.grid(axis="x", color=GRID)
    _legend(figure)
    return figure


def lines(
    title: str,
    subtitle: str,
    across: str,
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
) -> Figure:
    """Ratios from 0 to 1 over something that starts at 0, a line for each of the series: name, and
    points (x, ratio)."""
    figure, axes = _framed(title, subtitle, 5.6)
    for (name, points), (colour, marker) in zip(series, SERIES, strict=False):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, color=colour, marker=marker, linewidth=2.2, label=name, clip_on=False)
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    axes.set_xlabel(across, color=PALE)
    axes.yaxis.set_major_formatter(_percent())
    axes.grid(color=GRID)
    _legend(figure)
    return figure


def strips(
    title: str,
    subtitle: str,
    colours: Sequence[tuple[str, str]],
    rows: Sequence[Strip],
    ticks: Sequence[tuple[float, str]],
) -> Figure:
    """What happens when, a strip for each row. `colours`: name and colour, for the legend. `ticks`:
    place and label, from the beginning to the end."""
    from matplotlib.patches import Patch

    figure, axes = _framed(title, subtitle, 1.6 + 0.4 * len(rows))
    for at, row in enumerate(rows):
        for number, (colour, spans) in enumerate(row.spans):
            axes.broken_barh(
                list(spans), (at - 0.32, 0.64), color=colour, gid=f"{row.name}-{number}"
            )
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(ticks[0][0], ticks[-1][0])
    axes.set_xticks([place for place, _ in ticks], [label for _, label in ticks])
    _legend(figure, [Patch(color=colour, label=name) for name, colour in colours])
    return figure


def save(figure: Figure, path: Path, title: str) -> None:
    """Write the file that `check` was asked about. `title`: of the page, for HTML."""
    import matplotlib

    with matplotlib.rc_context(RC):
        if path.suffix == ".png":
            figure.savefig(path, dpi=PNG_DOTS_PER_INCH)
            return
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    path.write_text(svg if path.suffix == ".svg" else _page(svg, title), encoding="utf-8")


def _page(svg: str, title: str) -> str:
    """A page of HTML that holds the drawing, without what is for XML files only."""
    head = f'<head><meta charset="utf-8"><title>{escape(title)}</title></head>'
    body = svg[svg.index("<svg") :]
    return f'<!doctype html>\n<html lang="en">{head}\n<body>\n{body}</body></html>\n'


def _framed(title: str, subtitle: str, height_inches: float) -> tuple[Figure, Axes]:
    """An empty figure of this height, with its heading and without a frame around its axes."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(RC):
        figure = Figure(
            figsize=(WIDTH_INCHES, height_inches),
            layout=ConstrainedLayoutEngine(w_pad=PAD_INCHES, h_pad=PAD_INCHES),
        )
        axes = figure.add_subplot()
        # an empty second line: room for the subtitle, which is written smaller
        figure.suptitle(f"{title}\n", x=MARGIN, ha="left", weight="bold", size=15, color=INK)
        figure.text(MARGIN, 1 - SUBTITLE_INCHES / height_inches, subtitle, color=PALE)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=INK)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(figure: Figure, handles: Iterable[Any] | None = None) -> None:
    axes = figure.axes[0]
    axes.legend(
        handles=axes.get_legend_handles_labels()[0] if handles is None else list(handles),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(SERIES),
        frameon=False,
        borderaxespad=0.2,
        labelcolor=PALE,
    )


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=0)
