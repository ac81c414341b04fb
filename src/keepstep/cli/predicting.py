"""How a drill is done again by the simulation, and how the two are shown side by side (`keepstep
drill --predict`).

Comes in: the drill's order and what was seen. Goes out: the record in a file, a table, and the same
as data. The work is done in sim/.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from keepstep.sim.prediction import Comparison, Row, Sums, compare
from keepstep.sim.protocol.drawn import Drawn, draw
from keepstep.sim.protocol.record import Begun, Record
from keepstep.testing.conductor import GRACE_S, LINK_DEAD_S, Drill
from keepstep.testing.faults import Fault, to_plan
from keepstep.testing.witness import Facts

RECORD_FILE = "record.json"  # beside the journals: what the prediction was made of


def record_of(order: Drill, faults: Sequence[Fault], facts: Facts) -> Record:
    shape = {
        **{
            "nodes": order.nodes,
            "nproc": order.nproc,
            "policy": order.policy,
            "step_ms": order.step_ms,
        },
        **{
            "store": any(e.kind == "persist-started" for e in facts.events),
            "persist_every": order.persist_every,
        },
        **{"link_dead_s": LINK_DEAD_S, "grace_s": GRACE_S},
    }
    return Record(
        shape,
        to_plan(faults),
        facts.notes,
        [Begun(**line) for line in facts.phases],
        facts.committed,
        [facts.events],
    )


def predict(
    order: Drill, faults: Sequence[Fault], facts: Facts, seeds: int, shows_progress: bool
) -> tuple[Drawn, Comparison]:
    """Raises ConfigError when the job has not trained."""
    record = record_of(order, faults, facts)
    (order.work / facts.job / RECORD_FILE).write_text(
        json.dumps(record.to_json(), separators=(",", ":"))
    )
    drawn = draw(record)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not shows_progress
    ) as bar:
        task = bar.add_task("predicting, seeds", total=seeds)
        return drawn, compare(drawn, range(seeds), lambda: bar.advance(task))


def as_data(prediction: tuple[Drawn, Comparison] | None) -> dict[str, Any]:
    """What the report says besides; nothing where nothing was predicted."""
    if prediction is None:
        return {}
    _, found = prediction
    rows = [
        {
            "after": row.what,
            "seen": row.seen,
            "predicted": [
                {"source": source, "lost_steps": lost, "seeds": n}
                for (source, lost), n in row.predicted.most_common()
            ],
            "agrees": row.agrees,
        }
        for row in found.rows
    ]
    sums = {"resumptions": asdict(found.resumptions), "lost_steps": asdict(found.lost_steps)}
    by_source = {source: asdict(s) for source, s in found.by_source.items()}
    about = {
        "agrees": found.agrees,
        "rows": rows,
        **sums,
        "by_source": by_source,
        "overdue": found.overdue,
        "wrong": found.wrong,
    }
    return {"predicted": about}


def show(console: Console, prediction: tuple[Drawn, Comparison] | None) -> None:
    if prediction is None:
        return
    drawn, found = prediction
    seeds = len(found.lost_steps.predicted)
    table = Table(
        "after",
        "seen",
        "lost",
        "predicted: source, lost (of the seeds)",
        "",
        box=box.SIMPLE_HEAD,
        title="Predicted and seen",
    )
    for row in found.rows:
        table.add_row(
            row.what,
            *_cells(row),
            _predicted(row, seeds),
            "" if row.agrees else "[red]not predicted[/]",
        )
    console.print(table)
    console.print(f"of {seeds} seeds, the least, the mean and the most:", highlight=False)
    for name, sums in (
        ("resumed", found.resumptions),
        *((f"from {s}", v) for s, v in found.by_source.items()),
        ("steps lost", found.lost_steps),
    ):
        console.print(f"  {name}: {_words(sums)}", highlight=False, soft_wrap=True)
    for what in (
        *found.wrong,
        *(f"left out, since it was not done: {what}" for what in drawn.left_out),
    ):
        console.print(what, highlight=False, soft_wrap=True, markup=False)
    if found.overdue:
        console.print(
            f"{found.overdue} strikes of {seeds * len(drawn.strikes)} came at another "
            "moment: theirs did not come",
            highlight=False,
        )


def _cells(row: Row) -> tuple[str, str]:
    return ("-", "-") if row.seen is None else (row.seen[0], str(row.seen[1]))


def _predicted(row: Row, seeds: int) -> str:
    return "; ".join(
        f"{source}, {lost} ({n / seeds:.0%})" for (source, lost), n in row.predicted.most_common()
    )


def _words(sums: Sums) -> str:
    mean = sum(sums.predicted) / len(sums.predicted)
    outside = "" if sums.agrees else " [red](outside)[/]"
    return (
        f"{sums.seen} seen, predicted {min(sums.predicted)} / {mean:.1f} / "
        f"{max(sums.predicted)}{outside}"
    )
