"""`keepstep simulate`: what policies would be worth on a cluster nobody has rented yet.

Starts nothing and moves no bytes. Policies are compared on failures drawn from seeds
(`policy_comparison.py`), or on those of a real job with `--replay` (`journal_replay.py`);
`--preset gemini-fig15` computes a published figure instead (`published_figure.py`).

As JSON {"runs": [{"policy", "failures_per_day", "effective_ratio", ..}, ..]}; of a simulated
cluster each run has intervals, spread, lost steps, GPU-hours and cost. Of a replay {"cluster",
"happened": what the journal tells, "runs": [{"policy", "effective_ratio", "redone_steps",
"recovered", ..}, ..]}.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keepstep.cli import figures, policy_comparison, published_figure
from keepstep.cli.cluster_choice import (
    FileArgument,
    PresetOption,
    chosen_cluster,
    numbers,
    resized,
    whole_numbers,
)
from keepstep.cli.figures import PlotOption
from keepstep.cli.job_choice import JsonOption, print_json
from keepstep.cli.journal_replay import replayed
from keepstep.cli.policy_comparison import Comparing
from keepstep.errors import ConfigError
from keepstep.sim.economics.gemini import SYSTEMS


def simulate(
    file: FileArgument = None,
    preset: PresetOption = None,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY,...",
            help="Policies to compare: copies:2, parity:4, rs:8+2, none, store:3h or store:max, "
            "each followed by any of /in-process, /spares:N and /store:1h. Default: the usual "
            "ones.",
        ),
    ] = None,
    days: Annotated[float, typer.Option(metavar="DAYS", help="How long the job runs.")] = 30.0,
    seeds: Annotated[int, typer.Option(metavar="N", help="How many times to draw failures.")] = 20,
    first_seed: Annotated[int, typer.Option(metavar="N", help="The first seed.")] = 0,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Change the number of nodes. With gemini-fig15 several: 100,1000."
        ),
    ] = None,
    failures_per_day: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Change the number of failures. With gemini-fig15 several: 2,4,8."
        ),
    ] = None,
    journal: Annotated[
        list[Path] | None,
        typer.Option(
            "--replay",
            metavar="JOURNAL",
            help="Use the failures of a real job, from its journal; give that of every node.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    gpu_hour_cost: Annotated[
        float | None, typer.Option(metavar="PRICE", help="Price of a GPU for an hour.")
    ] = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Compare policies on a cluster: training that lasts, steps lost, GPU-hours, cost.

    Failures are drawn from seeds; every policy meets the same ones. Nothing is started.
    `--preset gemini-fig15` computes the published figure of the GEMINI paper instead.
    """
    if plot is not None:
        figures.check(plot)
    sizes = whole_numbers(nodes, "--nodes")
    rates = numbers(failures_per_day, "--failures-per-day")
    if preset == published_figure.PRESET and file is None:
        _published(sizes, rates, policies, plot, json)
        return
    if gpu_hour_cost is not None and not gpu_hour_cost >= 0:
        raise ConfigError(f"--gpu-hour-cost: expected 0 or more, found {gpu_hour_cost:g}")
    if len(sizes) > 1 or len(rates) > 1:
        raise ConfigError(
            "--nodes and --failures-per-day: expected one value, except with --preset "
            f"{published_figure.PRESET}, found {nodes or failures_per_day}"
        )
    size, rate = next(iter(sizes), None), next(iter(rates), None)
    cluster = resized(chosen_cluster(file, preset), size, rate)
    if journal:
        replayed(cluster, journal, policies, json)
    else:
        _compare(Comparing(cluster, days, seeds, first_seed), policies, gpu_hour_cost, plot, json)


def _compare(
    asked: Comparing,
    policies: str | None,
    gpu_hour_cost: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    cases = policy_comparison.cases_of(asked.cluster, policies)
    rows = policy_comparison.simulated(asked, cases, gpu_hour_cost)
    if plot is not None:
        drawn = policy_comparison.drawn(asked, rows)
        figures.save(drawn, plot, f"keepstep simulate {asked.cluster.name}")
    if as_json:
        print_json(policy_comparison.as_data(asked, rows))
    else:
        policy_comparison.show(asked, rows)


def _published(
    sizes: list[int], rates: list[float], policies: str | None, plot: Path | None, as_json: bool
) -> None:
    preset = published_figure.PRESET
    if policies is not None:
        systems = ", ".join(system.name for system in SYSTEMS)
        raise ConfigError(
            f"--policies: expected none with --preset {preset}, which compares {systems}, found "
            f"{policies!r}"
        )
    points = published_figure.points_of(sizes, rates)
    if plot is not None:
        figures.save(published_figure.drawn(points), plot, f"keepstep simulate {preset}")
    if as_json:
        print_json(published_figure.as_data(points))
    else:
        published_figure.show(points)
