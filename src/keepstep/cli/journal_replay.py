"""The failures of a real job, met by other policies (`keepstep simulate --replay`).

Comes in: the job's journals, the cluster it ran on, policies. Goes out: a table, and the same as
data. What was measured of the job stands for what the cluster file says of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.table import Table

from keepstep.cli.job_choice import print_json
from keepstep.cli.policy_comparison import cases_of
from keepstep.dashboard.screen import Screen
from keepstep.edge.os.journal import read_journal
from keepstep.model.cluster import DAY_S, Cluster
from keepstep.sim.economics.montecarlo import WalkOutcome, walk
from keepstep.sim.economics.replay import Replay, replay

SOURCES = ("own", "peers", "store")
HEADINGS = ("lasting", "steps done again", "from own memory", "from peers", "from the store")


def replayed(
    machines: Cluster, journals: Sequence[Path], policies: str | None, as_json: bool
) -> None:
    """Print what became of the job, and what would have become of it. Raises ConfigError when the
    journals tell of no training."""
    happened = replay(event for path in journals for event in read_journal(path))
    cluster = happened.cluster(machines)
    days = happened.seconds / DAY_S
    cases = cases_of(cluster, policies)
    outcomes = [walk(cluster, case, happened.failures, days, 0) for case in cases]
    if as_json:
        runs = [{**asdict(each), "effective_ratio": each.effective_ratio} for each in outcomes]
        print_json({"cluster": cluster, "happened": happened, "runs": runs})
        return
    console = Screen(highlight=False)
    console.print(_words(happened, cluster), soft_wrap=True)
    console.print(_table(happened, outcomes))


def _words(happened: Replay, cluster: Cluster) -> str:
    kinds = [failure.kind.scope.value for failure in happened.failures]
    counts = ", ".join(f"{kinds.count(kind)} of a {kind}" for kind in sorted(set(kinds)))
    return (
        f"{cluster.nodes} nodes, {happened.ranks} ranks, {happened.seconds:,.1f} s, steps of "
        f"{cluster.iteration_s:.3g} s; failures: {counts or 'none'}; on average noticed after "
        f"{happened.detection_s:.3g} s, and recovered from in {happened.recovery_s:.3g} s"
    )


def _table(happened: Replay, outcomes: Sequence[WalkOutcome]) -> Table:
    table = Table("policy", *HEADINGS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    lasting = f"{happened.effective_ratio:.2%}"
    table.add_row("as it happened", lasting, str(happened.redone_steps), "", "", "")
    for each in outcomes:
        recovered = [str(each.recovered[source]) for source in SOURCES]
        lasting = f"{each.effective_ratio:.2%}"
        table.add_row(each.policy, lasting, str(each.redone_steps), *recovered)
    return table
