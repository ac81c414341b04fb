"""`keepstep simulate`: what policies would be worth on a cluster nobody has rented yet.

Draws failures from seeds and charges what each costs (`sim/economics/montecarlo.py`); every policy
meets the same failures. Starts nothing and moves no bytes. `--preset gemini-fig15` computes a
published figure instead, by the account of its paper. As JSON {"runs": [{"policy",
"failures_per_day", "effective_ratio", ..}, ..]}; of a simulated cluster each run has intervals,
spread, lost steps, GPU-hours and cost.

`--replay` takes the failures of a real job from its journal (`sim/economics/replay.py`). As JSON
{"cluster", "happened": what the journal tells, "runs": [{"policy", "effective_ratio",
"redone_steps", "recovered", ..}, ..]}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from keepstep.cli import figure
from keepstep.cli.cluster_choice import (
    FileArgument,
    PresetOption,
    chosen_cluster,
    numbers,
    resized,
    whole_numbers,
)
from keepstep.cli.job_choice import JsonOption, print_json
from keepstep.core.economics.costs import Protection, parse_protection
from keepstep.core.economics.planner import SPARES_QUANTILE
from keepstep.core.economics.spares import spares
from keepstep.edge.os.journal import read_journal
from keepstep.errors import ConfigError
from keepstep.model.cluster import DAY_S, Cluster
from keepstep.model.units import human_bytes
from keepstep.sim.economics.gemini import INSTANCE_FAILURES_PER_DAY, PUBLISHED, SYSTEMS, Point
from keepstep.sim.economics.montecarlo import Case, prepare, run, walk
from keepstep.sim.economics.replay import replay
from keepstep.sim.economics.summary import Row, summarise

PAPER = "gemini-fig15"
# `lasting`: effective training time ratio, with the 95 % interval of its mean.
HEADINGS = (
    "lasting",
    "worst seed",
    "lost steps",
    "a failure",
    "from memory",
    "a node",
    "GPU-h wasted",
)
COST_HEADINGS = ("cost of it", "a useful GPU-h")
REPLAY_HEADINGS = ("lasting", "steps done again", "from own memory", "from peers", "from the store")
UNBROKEN = 140  # columns where nobody reads along


def simulate(
    file: FileArgument = None,
    preset: PresetOption = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="By commas: copies:2, parity:4, rs:8+2, none, store:3h, store:max; each with "
            "/in-process, /spares:N, /store:1h."
        ),
    ] = None,
    days: Annotated[float, typer.Option(help="How long the job runs.")] = 30.0,
    seeds: Annotated[int, typer.Option(help="How many draws.")] = 20,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    nodes: Annotated[
        str | None,
        typer.Option(help="Another number of nodes; of gemini-fig15 several, by commas."),
    ] = None,
    failures_per_day: Annotated[
        str | None, typer.Option(help="Another number of failures a day; of gemini-fig15 several.")
    ] = None,
    journal: Annotated[
        list[Path] | None,
        typer.Option(
            "--replay",
            help="Failures of a real job: its journal, or that of each node.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    gpu_hour_cost: Annotated[float | None, typer.Option(help="What a GPU costs an hour.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it: .svg, .html or .png.", dir_okay=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare policies on a cluster: time that lasts, steps lost, GPU-hours, cost."""
    if plot is not None:
        figure.check(plot)
    if preset == PAPER and file is None:
        if policies is not None:
            systems = ", ".join(system.name for system in SYSTEMS)
            raise ConfigError(
                f"--policies: expected none with --preset {PAPER}, which compares {systems}, "
                f"found {policies!r}"
            )
        _paper(
            whole_numbers(nodes, "--nodes"),
            numbers(failures_per_day, "--failures-per-day"),
            plot,
            json,
        )
        return
    if gpu_hour_cost is not None and not gpu_hour_cost >= 0:
        raise ConfigError(f"--gpu-hour-cost: expected 0 or more, found {gpu_hour_cost:g}")
    sizes, rates = whole_numbers(nodes, "--nodes"), numbers(failures_per_day, "--failures-per-day")
    if len(sizes) > 1 or len(rates) > 1:
        raise ConfigError(
            "--nodes and --failures-per-day: expected one value, except with --preset "
            f"{PAPER}, found {nodes or failures_per_day}"
        )
    cluster = resized(
        chosen_cluster(file, preset), next(iter(sizes), None), next(iter(rates), None)
    )
    if journal:
        _replay(cluster, journal, policies, json)
        return
    cases = _cases(cluster, policies)
    outcomes = _run(cluster, cases, days, seeds, first_seed)
    rows = [
        summarise(cluster, case.spares, case.charges.memory_bytes, outcomes[number], gpu_hour_cost)
        for number, case in enumerate(cases)
    ]
    if plot is not None:
        figure.save(_bars(cluster, rows, days, seeds), plot, f"keepstep simulate {cluster.name}")
    if json:
        print_json(_answer(cluster, rows, days, seeds, first_seed))
    else:
        _show(cluster, rows, days, seeds)


def _replay(machines: Cluster, journals: Sequence[Path], policies: str | None, json: bool) -> None:
    """The failures that really happened, met by each policy; what was measured of the job stands
    for what the cluster file says of it."""
    happened = replay(event for path in journals for event in read_journal(path))
    cluster = happened.cluster(machines)
    cases = _cases(cluster, policies)
    outcomes = [
        walk(cluster, case, happened.failures, happened.seconds / DAY_S, 0) for case in cases
    ]
    if json:
        runs = [{**asdict(o), "effective_ratio": o.effective_ratio} for o in outcomes]
        print_json({"cluster": cluster, "happened": happened, "runs": runs})
        return
    kinds = [failure.kind.scope.value for failure in happened.failures]
    counts = ", ".join(f"{kinds.count(kind)} of a {kind}" for kind in sorted(set(kinds))) or "none"
    console = Console(highlight=False)
    console.print(
        f"{cluster.nodes} nodes, {happened.ranks} ranks, {happened.seconds:,.1f} s, steps of "
        f"{cluster.iteration_s:.3g} s; "
        f"failures: {counts}; noticed after {happened.detection_s:.3g} s, recovered from in "
        f"{happened.recovery_s:.3g} s, in the mean",
        soft_wrap=True,
    )
    table = Table("policy", *REPLAY_HEADINGS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_row(
        "as it happened", f"{happened.effective_ratio:.2%}", str(happened.redone_steps), "", "", ""
    )
    for o in outcomes:
        table.add_row(
            o.policy,
            f"{o.effective_ratio:.2%}",
            str(o.redone_steps),
            *(str(o.recovered[s]) for s in ("own", "peers", "store")),
        )
    console.print(table)


def _cases(cluster: Cluster, text: str | None) -> list[Case]:
    if text is not None:
        return [prepare(cluster, parse_protection(part.strip())) for part in text.split(",")]
    cases = []
    for protection in _usual(cluster):
        try:
            cases.append(prepare(cluster, protection))
        except ConfigError as error:
            Console(stderr=True, highlight=False).print(
                f"left out: {error}", style="dim", soft_wrap=True, markup=False
            )
    return cases


def _usual(cluster: Cluster) -> list[Protection]:
    """What people do, and what keepstep offers."""
    best = "copies:2" + ("/in-process" if cluster.in_process_restart_s is not None else "")
    best += f"/spares:{max(cluster.spares, spares(cluster, SPARES_QUANTILE))}"
    return [
        parse_protection(text)
        for text in ("store:3h", "store:max", "copies:2", "parity:4", f"{best}/store:10m")
    ]


def _run(
    cluster: Cluster, cases: Sequence[Case], days: float, seeds: int, first_seed: int
) -> list[Any]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("simulating", total=seeds * len(cases))
        return run(cluster, cases, days, seeds, first_seed, lambda: progress.advance(task))


def _answer(
    cluster: Cluster, rows: Sequence[Row], days: float, seeds: int, first_seed: int
) -> dict[str, Any]:
    runs = []
    for row in rows:
        told = {
            key: value
            for key, value in asdict(row).items()
            if key not in ("policy", "effective_ratio")
        }
        ratio = row.effective_ratio
        runs.append(
            {
                "policy": row.policy,
                "failures_per_day": cluster.failures_per_day,
                "effective_ratio": ratio.mean,
                "effective_ratio_spread": ratio,
                **told,
            }
        )
    return {
        "cluster": cluster,
        "days": days,
        "seeds": seeds,
        "first_seed": first_seed,
        "runs": runs,
    }


def _show(cluster: Cluster, rows: Sequence[Row], days: float, seeds: int) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, UNBROKEN)
    console.print(_words(cluster, days, seeds), soft_wrap=True)
    with_cost = rows[0].cost is not None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", overflow="fold")
    for heading in (*HEADINGS, *(COST_HEADINGS if with_cost else ())):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*_cells(row), *(_cost_cells(row) if with_cost else []))
    console.print(table)


def _cells(row: Row) -> list[str]:
    ratio = row.effective_ratio
    within = (
        ""
        if ratio.low is None or ratio.high is None
        else f" \u00b1{(ratio.high - ratio.low) / 2:.2%}"
    )
    return [
        row.policy,
        f"{ratio.mean:.2%}{within}",
        f"{ratio.least:.2%}",
        f"{row.lost_steps.mean:,.0f}",
        f"{row.lost_steps_per_failure:,.2f}",
        f"{row.memory_ratio:.1%}",
        human_bytes(int(row.memory_bytes)) if row.memory_bytes else "-",
        f"{row.wasted_gpu_hours:,.0f}",
    ]


def _cost_cells(row: Row) -> list[str]:
    useful = "-" if row.cost_per_useful_gpu_hour is None else f"{row.cost_per_useful_gpu_hour:,.2f}"
    return [f"{row.wasted_cost:,.0f}", useful]


def _words(cluster: Cluster, days: float, seeds: int) -> str:
    return (
        f"{cluster.name}: {cluster.nodes:,} nodes, {cluster.gpus:,} GPUs, "
        f"{cluster.failures_per_day:.3g} failures a day, "
        f"{days:g} days, {seeds} seed{'' if seeds == 1 else 's'}"
    )


def _bars(cluster: Cluster, rows: Sequence[Row], days: float, seeds: int) -> figure.Figure:
    drawn = []
    for row in rows:
        ratio = row.effective_ratio
        low, high = (
            (ratio.mean, ratio.mean)
            if ratio.low is None or ratio.high is None
            else (ratio.low, ratio.high)
        )
        drawn.append(
            figure.Bar(
                row.policy,
                (ratio.mean, row.lost_ratio, row.down_ratio, row.stalled_ratio),
                low,
                high,
            )
        )
    return figure.bars(
        "Where the time goes", f"{_words(cluster, days, seeds)}; whiskers: 95 % of the mean", drawn
    )


def _paper(nodes: list[int], failures: list[float], plot: Path | None, json: bool) -> None:
    asked = [Point(INSTANCE_FAILURES_PER_DAY * count, count) for count in nodes] + [
        Point(per_day) for per_day in failures
    ]
    points = asked or PUBLISHED
    runs = [
        {
            "policy": system.name,
            "failures_per_day": point.failures_per_day,
            "nodes": point.nodes or 16,
            "effective_ratio": system.effective_ratio(point.failures_per_day),
        }
        for point in points
        for system in SYSTEMS
    ]
    if plot is not None:
        series = [
            (
                system.name,
                [(p.failures_per_day, system.effective_ratio(p.failures_per_day)) for p in points],
            )
            for system in SYSTEMS
        ]
        drawn = figure.lines(
            "Effective training time",
            "GEMINI's figure 15, computed by its own account",
            "failures a day",
            series,
        )
        figure.save(drawn, plot, "keepstep simulate gemini-fig15")
    if json:
        print_json({"runs": runs})
        return
    table = Table(
        "failures a day",
        "instances",
        *(system.name for system in SYSTEMS),
        title="Effective training time ratio, GEMINI's figure 15",
    )
    for point in points:
        ratios = (f"{system.effective_ratio(point.failures_per_day):.3f}" for system in SYSTEMS)
        table.add_row(f"{point.failures_per_day:g}", str(point.nodes or 16), *ratios)
    Console(highlight=False).print(table)
