"""`keepstep plan`: the policy that a cluster deserves, and why, in a dozen lines.

Computes (`core/economics/planner.py`), draws nothing, starts nothing. As JSON: {"policy", "why":
[..], "redundancy", "effective_ratio", "store_interval_s": {"young", "daly", "exact", "least",
"chosen"}, "kept_checkpoints", "spares", "spares_p99", "memory_bytes", "candidates": [..],
"refused": {..}}.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from keepstep.cli.cluster_choice import FileArgument, PresetOption, chosen_cluster, resized
from keepstep.cli.job_choice import JsonOption, print_json
from keepstep.core.economics.plan_reasons import reasons
from keepstep.core.economics.planner import Candidate, PolicyPlan
from keepstep.core.economics.planner import plan as plan_for
from keepstep.dashboard.screen import Screen
from keepstep.errors import ConfigError
from keepstep.model.units import human_bytes


def plan(
    file: FileArgument = None,
    preset: PresetOption = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Change the number of nodes.")
    ] = None,
    failures_per_day: Annotated[
        float | None, typer.Option(metavar="N", help="Change the number of failures.")
    ] = None,
    all_candidates: Annotated[
        bool, typer.Option("--all", help="Show every policy that was compared.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Recommend a policy, an interval between checkpoints and a number of spares, with reasons."""
    if failures_per_day is not None and not failures_per_day >= 0:
        raise ConfigError(f"--failures-per-day: expected 0 or more, found {failures_per_day:g}")
    found = plan_for(resized(chosen_cluster(file, preset), nodes, failures_per_day))
    if json:
        print_json(_answer(found))
        return
    console = Screen(highlight=False, soft_wrap=True)
    console.print(str(found.chosen.policy), style="bold", markup=False)
    for sentence in reasons(found):
        console.print(f"  {sentence}", markup=False)
    if all_candidates:
        _show_all(found, console)


def _answer(found: PolicyPlan) -> dict[str, Any]:
    chosen = found.chosen
    interval = chosen.interval
    return {
        **_candidate(chosen),
        "redundancy": "none" if chosen.policy.scheme is None else str(chosen.policy.scheme),
        "store_interval_s": {
            "young": interval.young_s,
            "daly": interval.daly_s,
            "exact": interval.exact_s,
            "least": interval.least_s,
            "chosen": interval.chosen_s,
        },
        "kept_checkpoints": interval.kept,
        "kept_apart_s": interval.kept_s,
        "spares_p99": found.spares_p99,
        "why": reasons(found),
        "candidates": [_candidate(candidate) for candidate in found.candidates],
        "refused": found.refused,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "policy": str(candidate.policy),
        "effective_ratio": candidate.effective_ratio,
        "value_ratio": candidate.value_ratio,
        "memory_bytes": candidate.memory_bytes,
        "spares": candidate.policy.spares,
        "to_store_per_day": candidate.to_store_per_day,
    }


def _show_all(found: PolicyPlan, console: Console) -> None:
    table = Table("policy", "lasting", "of what is paid for", "memory a node", "to the store a day")
    for each in found.candidates:
        table.add_row(
            str(each.policy),
            f"{each.effective_ratio:.2%}",
            f"{each.value_ratio:.2%}",
            human_bytes(int(each.memory_bytes)) if each.memory_bytes else "",
            f"{each.to_store_per_day:.2g}",
            style="bold" if each is found.chosen else "",
        )
    console.print(table)
