"""Policies compared on a cluster that nobody has rented yet (`keepstep simulate`).

Comes in: a cluster, policies, seeds. Goes out: a table, a figure, and the same as data. Failures
are drawn from seeds and charged what each costs (`sim/economics/montecarlo.py`); every policy meets
the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from keepstep.cli import figures
from keepstep.cli.progress_bar import counting_bar
from keepstep.core.economics.costs import ClusterPolicy, parse_cluster_policy
from keepstep.core.economics.planner import SPARES_QUANTILE
from keepstep.core.economics.spares import spares
from keepstep.dashboard.screen import Screen
from keepstep.errors import ConfigError
from keepstep.model.cluster import Cluster
from keepstep.model.units import human_bytes
from keepstep.sim.economics.montecarlo import Case, prepare, run
from keepstep.sim.economics.summary import Row, Spread, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# "lasting": effective training time ratio, with the 95 % interval of its mean.
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
UNBROKEN_COLUMNS = 140  # where no person reads along


@dataclass(frozen=True, slots=True)
class Comparing:
    """What is compared, over how many days, with which seeds."""

    cluster: Cluster
    days: float
    seeds: int
    first_seed: int

    @property
    def words(self) -> str:
        """For a heading."""
        return (
            f"{self.cluster.name}: {self.cluster.nodes:,} nodes, {self.cluster.gpus:,} GPUs, "
            f"{self.cluster.failures_per_day:.3g} failures a day, {self.days:g} days, "
            f"{self.seeds} seed{'' if self.seeds == 1 else 's'}"
        )


def cases_of(cluster: Cluster, policies: str | None) -> list[Case]:
    """The policies that are asked for, by commas, or else the usual ones that fit; what does not
    fit is told. Raises ConfigError when one that is asked for does not."""
    if policies is not None:
        return [
            prepare(cluster, parse_cluster_policy(part.strip())) for part in policies.split(",")
        ]
    cases = []
    for policy in _usual(cluster):
        try:
            cases.append(prepare(cluster, policy))
        except ConfigError as error:
            console = Screen(stderr=True, highlight=False, soft_wrap=True)
            console.print(f"left out: {error}", style="dim", markup=False)
    return cases


def _usual(cluster: Cluster) -> list[ClusterPolicy]:
    """What people do, and what keepstep offers."""
    in_process = "/in-process" if cluster.in_process_restart_s is not None else ""
    spare_nodes = max(cluster.spares, spares(cluster, SPARES_QUANTILE))
    best = f"copies:2{in_process}/spares:{spare_nodes}/store:10m"
    texts = ("store:3h", "store:max", "copies:2", "parity:4", best)
    return [parse_cluster_policy(text) for text in texts]


def simulated(asked: Comparing, cases: Sequence[Case], gpu_hour_cost: float | None) -> list[Row]:
    """One row for each case. `gpu_hour_cost`: what a GPU costs an hour, in any currency."""
    with counting_bar() as bar:
        task = bar.add_task("simulating", total=asked.seeds * len(cases))
        outcomes = run(
            asked.cluster,
            cases,
            asked.days,
            asked.seeds,
            asked.first_seed,
            lambda: bar.advance(task),
        )
    return [
        summarise(asked.cluster, case.spares, case.charges.memory_bytes, found, gpu_hour_cost)
        for case, found in zip(cases, outcomes, strict=True)
    ]


def as_data(asked: Comparing, rows: Sequence[Row]) -> dict[str, Any]:
    """For `--json`."""
    return {
        "cluster": asked.cluster,
        "days": asked.days,
        "seeds": asked.seeds,
        "first_seed": asked.first_seed,
        "runs": [_row_as_data(asked.cluster, row) for row in rows],
    }


def _row_as_data(cluster: Cluster, row: Row) -> dict[str, Any]:
    return {
        **asdict(row),
        "failures_per_day": cluster.failures_per_day,
        "effective_ratio": row.effective_ratio.mean,
        "effective_ratio_spread": row.effective_ratio,
    }


def show(asked: Comparing, rows: Sequence[Row]) -> None:
    """Print the table."""
    console = Screen(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, UNBROKEN_COLUMNS)
    console.print(asked.words, soft_wrap=True)
    has_cost = rows[0].cost is not None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", overflow="fold")
    for heading in (*HEADINGS, *(COST_HEADINGS if has_cost else ())):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*_cells(row), *(_cost_cells(row) if has_cost else []))
    console.print(table)


def _cells(row: Row) -> list[str]:
    low, high = _interval(row.effective_ratio)
    within = f" \u00b1{(high - low) / 2:.2%}" if high > low else ""
    return [
        row.policy,
        f"{row.effective_ratio.mean:.2%}{within}",
        f"{row.effective_ratio.least:.2%}",
        f"{row.lost_steps.mean:,.0f}",
        f"{row.lost_steps_per_failure:,.2f}",
        f"{row.memory_ratio:.1%}",
        human_bytes(int(row.memory_bytes)) if row.memory_bytes else "-",
        f"{row.wasted_gpu_hours:,.0f}",
    ]


def _cost_cells(row: Row) -> list[str]:
    useful = "-" if row.cost_per_useful_gpu_hour is None else f"{row.cost_per_useful_gpu_hour:,.2f}"
    return [f"{row.wasted_cost:,.0f}", useful]


def _interval(ratio: Spread) -> tuple[float, float]:
    """Of the mean; with one seed there is none but the mean."""
    if ratio.low is None or ratio.high is None:
        return ratio.mean, ratio.mean
    return ratio.low, ratio.high


def drawn(asked: Comparing, rows: Sequence[Row]) -> Figure:
    """A bar for each policy: useful, redone, waiting for recovery, held up by saving."""
    bars = []
    for row in rows:
        low, high = _interval(row.effective_ratio)
        shares = (row.effective_ratio.mean, row.lost_ratio, row.down_ratio, row.stalled_ratio)
        bars.append(figures.Bar(row.policy, shares, low, high))
    subtitle = f"{asked.words}; whiskers: 95 % confidence interval of the mean"
    return figures.bars("Where the time goes", subtitle, bars)
