"""GEMINI's figure 15 (`keepstep simulate --preset gemini-fig15`), computed by its own account.

Comes in: points to compute. Goes out: a table, a figure, and the same as data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from keepstep.cli import figures
from keepstep.dashboard.screen import Screen
from keepstep.sim.economics.gemini import INSTANCE_FAILURES_PER_DAY, PUBLISHED, SYSTEMS, Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRESET = "gemini-fig15"
TESTBED_NODES = 16


def points_of(nodes: Sequence[int], failures_per_day: Sequence[float]) -> Sequence[Point]:
    """One for each number of nodes, and one for each number of failures; without any, the figure's
    own."""
    by_nodes = [Point(INSTANCE_FAILURES_PER_DAY * count, count) for count in nodes]
    return by_nodes + [Point(per_day) for per_day in failures_per_day] or PUBLISHED


def as_data(points: Sequence[Point]) -> dict[str, Any]:
    """For `--json`."""
    runs = [
        {
            "policy": system.name,
            "failures_per_day": point.failures_per_day,
            "nodes": point.nodes or TESTBED_NODES,
            "effective_ratio": system.effective_ratio(point.failures_per_day),
        }
        for point in points
        for system in SYSTEMS
    ]
    return {"runs": runs}


def show(points: Sequence[Point]) -> None:
    """Print the table."""
    names = [system.name for system in SYSTEMS]
    title = "Effective training time ratio, GEMINI's figure 15"
    table = Table("failures a day", "instances", *names, title=title)
    for point in points:
        ratios = (f"{system.effective_ratio(point.failures_per_day):.3f}" for system in SYSTEMS)
        nodes = str(point.nodes or TESTBED_NODES)
        table.add_row(f"{point.failures_per_day:g}", nodes, *ratios)
    Screen(highlight=False).print(table)


def drawn(points: Sequence[Point]) -> Figure:
    """A line for each system over failures a day."""
    rates = [point.failures_per_day for point in points]
    series = [
        (system.name, [(rate, system.effective_ratio(rate)) for rate in rates])
        for system in SYSTEMS
    ]
    subtitle = "GEMINI's figure 15, computed by its own account"
    return figures.lines("Effective training time", subtitle, "failures a day", series)
