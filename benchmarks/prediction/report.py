"""Report: the simulation does a recorded drill again, and both are shown side by side.

Comes in: the record. Goes out: a table, and the same as data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.prediction.comparison import Comparison, Row, Sums, compare
from benchmarks.prediction.drawn import Drawn, draw
from benchmarks.prediction.record import Record


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was taken from the drill, and seen and predicted beside each other."""

    drawn: Drawn
    comparison: Comparison

    @property
    def seeds(self) -> int:
        """How often it was simulated."""
        return len(self.comparison.lost_steps.predicted)


def predict(record: Record, seeds: int, tell: Callable[[], None] = lambda: None) -> Prediction:
    """Simulate what was recorded so many times; `tell` hears of each. Raises ConfigError when its
    job has not trained."""
    drawn = draw(record)
    return Prediction(drawn, compare(drawn, range(seeds), tell))


def as_data(prediction: Prediction) -> dict[str, Any]:
    """The comparison, for the report's JSON."""
    found = prediction.comparison
    return {
        "agrees": found.agrees,
        "rows": [_row_as_data(row) for row in found.rows],
        "resumptions": asdict(found.resumptions),
        "lost_steps": asdict(found.lost_steps),
        "by_source": {source: asdict(sums) for source, sums in found.by_source.items()},
        "overdue": found.overdue,
        "wrong": found.wrong,
    }


def _row_as_data(row: Row) -> dict[str, Any]:
    predicted = [
        {"source": source, "lost_steps": lost_steps, "seeds": seeds}
        for (source, lost_steps), seeds in row.predicted.most_common()
    ]
    return {"after": row.what, "seen": row.seen, "predicted": predicted, "agrees": row.agrees}


def show(console: Console, prediction: Prediction) -> None:
    """Print the comparison."""
    console.print(_table(prediction))
    for line in _sentences(prediction):
        console.print(line, highlight=False, soft_wrap=True)


def _table(prediction: Prediction) -> Table:
    table = Table(
        "after",
        "seen",
        "lost steps",
        "predicted: source, lost steps (of the seeds)",
        "",
        box=box.SIMPLE_HEAD,
        title="Seen and predicted",
    )
    for row in prediction.comparison.rows:
        source, lost_steps = ("-", "-") if row.seen is None else (row.seen[0], str(row.seen[1]))
        predicted = "; ".join(
            f"{source}, {lost_steps} ({seeds / prediction.seeds:.0%})"
            for (source, lost_steps), seeds in row.predicted.most_common()
        )
        agrees = "" if row.agrees else "[red]not predicted[/]"
        table.add_row(row.what, source, lost_steps, predicted, agrees)
    return table


def _sentences(prediction: Prediction) -> Iterator[str]:
    found = prediction.comparison
    yield f"least, mean and most of {prediction.seeds} seeds:"
    yield f"  resumed: {_sums(found.resumptions)}"
    for source, sums in found.by_source.items():
        yield f"  from {source}: {_sums(sums)}"
    yield f"  steps lost: {_sums(found.lost_steps)}"
    yield from map(escape, found.wrong)
    for what in prediction.drawn.left_out:
        yield escape(f"left out, since the drill could not do it: {what}")
    if found.overdue:
        faults = prediction.seeds * len(prediction.drawn.strikes)
        yield (
            f"{found.overdue} of {faults} simulated faults missed their moment and came at another"
        )


def _sums(sums: Sums) -> str:
    mean = sum(sums.predicted) / len(sums.predicted)
    outside = "" if sums.agrees else " [red](outside)[/]"
    return (
        f"{sums.seen} seen, predicted {min(sums.predicted)} / {mean:.1f} / "
        f"{max(sums.predicted)}{outside}"
    )
