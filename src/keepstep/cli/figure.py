"""A figure for a slide: bars that say where the time went, or lines over failures a day.

Comes in: names and numbers. Goes out: a file: SVG, the same in a page of HTML that needs nothing
else, or PNG (matplotlib, the extra `plot`). Both are painted from one list of marks in pixels, so
that they look alike. Never computes a figure it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from keepstep.errors import ConfigError

INK, PALE, GRID = "#1b1f24", "#667080", "#dfe3e8"
SHARES = (
    ("useful", "#2a7f62"),
    ("redone", "#d1495b"),
    ("waiting for recovery", "#edae49"),
    ("held up by saving", "#7a6fb0"),
)
COLOURS = ("#2a7f62", "#2e5eaa", "#d1495b", "#edae49", "#7a6fb0", "#667080")
FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
KINDS = (".svg", ".html", ".png")


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class Line:
    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Text:
    """`x`, `y`: the start, middle or end of the baseline."""

    x: float
    y: float
    text: str
    size: float = 14
    anchor: str = "start"
    colour: str = INK
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    width: int
    height: int
    marks: tuple[Rect | Line | Text, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """`shares` sum to 1: useful, redone, waiting, held up. `low`, `high`: the interval of the
    first."""

    name: str
    shares: tuple[float, float, float, float]
    low: float
    high: float


def bars(title: str, subtitle: str, rows: Sequence[Bar]) -> Figure:
    width, left, right, top, step = 1000, 345, 90, 130, 46
    span = width - left - right
    bottom = top + step * len(rows)
    marks: list[Rect | Line | Text] = [
        Rect(0, 0, width, bottom + 50, "#ffffff"),
        *_heading(title, subtitle),
    ]
    at = 40.0
    for name, colour in SHARES:
        marks += [Rect(at, 88, 14, 14, colour), Text(at + 20, 100, name, 13, colour=PALE)]
        at += 52 + 7.4 * len(name)
    for tenth in range(0, 11, 2):
        x = left + span * tenth / 10
        marks += [
            Line(((x, top - 6), (x, bottom)), GRID),
            Text(x, bottom + 22, f"{tenth * 10} %", 12, "middle", PALE),
        ]
    for number, row in enumerate(rows):
        y, x = top + step * number, float(left)
        marks.append(Text(left - 12, y + 22, row.name, 14, "end"))
        for share, (_, colour) in zip(row.shares, SHARES, strict=True):
            marks.append(Rect(x, y + 4, span * share, 28, colour))
            x += span * share
        low, high = (left + span * min(max(value, 0.0), 1.0) for value in (row.low, row.high))
        marks += [Line(((low, y + 18), (high, y + 18)), INK, 2)]
        marks += [Line(((end, y + 12), (end, y + 24)), INK, 2) for end in (low, high)]
        marks.append(Text(width - right + 10, y + 23, f"{row.shares[0]:.1%}", 15, bold=True))
    return Figure(width, bottom + 50, tuple(marks))


def lines(
    title: str,
    subtitle: str,
    across: str,
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
) -> Figure:
    """Ratios from 0 to 1 over something that starts at 0."""
    width, height, left, right, top, bottom = 1000, 560, 90, 190, 100, 490
    most = max((x for _, points in series for x, _ in points), default=1.0) * 1.02 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (width - left - right) * x / most, bottom - (bottom - top) * y

    marks: list[Rect | Line | Text] = [
        Rect(0, 0, width, height, "#ffffff"),
        *_heading(title, subtitle),
    ]
    for fifth in range(6):
        (x, y), (end, _) = place(0, fifth / 5), place(most, 0)
        marks += [
            Line(((x, y), (end, y)), GRID),
            Text(x - 10, y + 5, f"{fifth / 5:.0%}", 12, "end", PALE),
        ]
    tick = _round_step(most / 6)
    for number in range(int(most / tick) + 1):
        marks.append(
            Text(place(number * tick, 0)[0], bottom + 22, f"{number * tick:g}", 12, "middle", PALE)
        )
    marks.append(Text((left + width - right) / 2, bottom + 50, across, 14, "middle", PALE))
    for number, (name, points) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        path = tuple(place(x, y) for x, y in sorted(points))
        marks += [Line(path, colour, 3), *(Rect(x - 4, y - 4, 8, 8, colour) for x, y in path)]
        marks += [Text(x + 14, y + 5, name, 14, colour=colour, bold=True) for x, y in path[-1:]]
    return Figure(width, height, tuple(marks))


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, .. (and 0.5, 0.2, ..) that is not below."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _heading(title: str, subtitle: str) -> tuple[Text, Text]:
    return Text(40, 42, title, 22, bold=True), Text(40, 68, subtitle, 14, colour=PALE)


def check(path: Path) -> None:
    """Before anything is computed for it: is this a file we can make? Raises ConfigError."""
    if path.suffix not in KINDS:
        raise ConfigError(
            f"--plot: expected a file that ends in {', '.join(KINDS)}, found {str(path)!r}"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: expected a directory, found no {str(path.parent)!r}")
    if path.suffix == ".png":
        _matplotlib()


def save(figure: Figure, path: Path, title: str) -> None:
    """Raises ConfigError when the file's name ends in nothing known, or what PNG needs is not
    installed."""
    check(path)
    if path.suffix == ".png":
        _save_png(figure, path)
        return
    drawn = svg(figure)
    head = f'<head><meta charset="utf-8"><title>{escape(title)}</title></head>'
    page = f'<!doctype html>\n<html lang="en">{head}\n<body>\n{drawn}</body></html>\n'
    path.write_text(page if path.suffix == ".html" else drawn, encoding="utf-8")


def svg(figure: Figure) -> str:
    body = "\n".join(_svg_mark(mark) for mark in figure.marks)
    box = (
        f'viewBox="0 0 {figure.width} {figure.height}" width="{figure.width}" '
        f'height="{figure.height}"'
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="{FONT}">\n{body}\n</svg>\n'


def _svg_mark(mark: Rect | Line | Text) -> str:
    match mark:
        case Rect(x, y, width, height, colour):
            return (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'fill="{colour}"/>'
            )
        case Line(points, colour, width):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            return (
                f'<polyline points="{path}" fill="none" stroke="{colour}" '
                f'stroke-width="{width:g}"/>'
            )
        case Text(x, y, text, size, anchor, colour, bold):
            look = f'font-size="{size:g}" text-anchor="{anchor}" fill="{colour}"' + (
                ' font-weight="bold"' if bold else ""
            )
            return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        fix = "pip install 'keepstep[plot]', or ask for .svg or .html"
        raise ConfigError(f"--plot: expected matplotlib for PNG, found none: {fix}") from error
    return matplotlib


def _save_png(figure: Figure, path: Path) -> None:
    _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Rectangle

    dpi = 100  # a pixel is 0.72 points
    canvas = Canvas(figsize=(figure.width / dpi, figure.height / dpi), dpi=dpi)
    FigureCanvasAgg(canvas)
    axes = canvas.add_axes((0, 0, 1, 1), xlim=(0, figure.width), ylim=(figure.height, 0))
    axes.set_axis_off()
    align = {"start": "left", "middle": "center", "end": "right"}
    for order, mark in enumerate(figure.marks):
        match mark:
            case Rect(x, y, width, height, colour):
                axes.add_patch(
                    Rectangle((x, y), width, height, color=colour, linewidth=0, zorder=order)
                )
            case Line(points, colour, width):
                axes.plot(
                    *zip(*points, strict=True), color=colour, linewidth=0.72 * width, zorder=order
                )
            case Text(x, y, text, size, anchor, colour, bold):
                weight = "bold" if bold else "normal"
                axes.text(
                    x,
                    y,
                    text,
                    fontsize=0.72 * size,
                    ha=align[anchor],
                    color=colour,
                    weight=weight,
                    zorder=order,
                    parse_math=False,
                )
    canvas.savefig(path, dpi=2 * dpi)
