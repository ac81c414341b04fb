"""How a soak is begun, and how its tally is shown.

Comes in: the drill's order and what `--kinds` says. Goes out: a report (the verdict's, with the
tally in it), and tables. The work is done in testing/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keepstep.errors import ConfigError
from keepstep.testing.conductor import LINK_DEAD_S, Drill, can_mount, conduct, reference
from keepstep.testing.etcd import MISSING
from keepstep.testing.network import why_no_namespaces
from keepstep.testing.soak import Soak
from keepstep.testing.tally import tally
from keepstep.testing.turns import Shape, draw_turns, possible
from keepstep.testing.verdict import judge
from keepstep.testing.witness import Facts

SCHEDULE_STEPS = 1000


def make(order: Drill, seconds: float, kinds: str) -> Soak:
    """Raises ConfigError."""
    if order.launcher != "run":
        raise ConfigError(f"--soak: expected --launcher run, found {order.launcher}")
    if order.etcd and MISSING:
        raise ConfigError(f"--rdzv-backend: {MISSING}")
    has_namespaces = order.nodes > 1 and order.namespaces is not False and not why_no_namespaces()
    drawn = possible(
        kinds,
        order.nodes,
        has_namespaces,
        order.store is None and can_mount(order.work / "store"),
        order.etcd,
    )
    shape = Shape(order.nodes, order.nproc, order.step_ms, LINK_DEAD_S * 1000)
    protects = order.nodes > 1 and order.policy != "none"
    return Soak(seconds, shape, draw_turns(order.seed, shape, drawn), protects, "full" in drawn)


def run(order: Drill, soak: Soak, tell: Callable[[int, int], None]) -> tuple[Facts, dict[str, Any]]:
    """The job with its faults first, since only it says how many steps the undisturbed one has to
    do."""
    order = replace(order, steps=SCHEDULE_STEPS, persist_s=0.0)
    facts = conduct(order, tell, soak)
    ended = soak.stop_step is not None and facts.exit_code == 0
    expected = reference(replace(order, stop_step=soak.stop_step)) if ended else None
    report = judge(soak.faults, facts, expected)
    report["proved"] = report["proved"] and not soak.failure and report["recovered"]
    report |= {
        "soak": tally(soak.faults, soak.passed, soak.lasted_ns, report),
        "failure": soak.failure,
        "steps": soak.stop_step,
    }
    return facts, report


def show(console: Console, report: dict[str, Any]) -> None:
    soak = report["soak"]
    table = Table(
        "what",
        "turns",
        "median s",
        "99 % s",
        "protected: median s",
        "99 % s",
        title="From a fault to a new step of every rank",
    )
    for name, row in (*soak["turns"].items(), ("all", soak["all_turns"])):
        times = [
            str(row[of][q]) if row[of] else ""
            for of in ("trained_s", "protected_s")
            for q in ("median", "p99")
        ]
        table.add_row(name, str(row["turns"]), *times)
    console.print(table)
    said = [
        f"{soak['injected']} faults in {soak['lasted_s']} s ({soak['faults_per_minute']} a "
        f"minute), {soak['recovered']} recovered from",
        f"injected: {_words(soak['injected_by_kind'])}",
        f"steps lost: times: {_words(soak['lost_steps'])}; where more was lost than the "
        "policy survives: " + (_words(soak["lost_steps_beyond_policy"]) or "never"),
        f"resumed from: {_words(soak['sources'])}",
    ]
    said += [
        f"not injected: {f['asked']}: {f['evidence']}"
        for f in report["faults"]
        if not f["injected"]
    ]
    said += [
        f"no evidence of: {f['asked']}: {f['evidence']}"
        for f in report["faults"]
        if f["injected"] and not f["seen"]
    ]
    for line in said:
        console.print(escape(line), highlight=False, soft_wrap=True)
    if report["failure"]:
        console.print(f"[red]{escape(report['failure'])}[/]", highlight=False, soft_wrap=True)


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())
