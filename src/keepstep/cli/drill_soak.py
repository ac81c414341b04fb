"""`keepstep drill --soak`: how a soak is begun, and how its tally is shown.

Comes in: a drill, how long to soak, and the kinds of fault to draw from. Goes out: a report (the
verdict's, with the tally in it), and tables. The work is done in testing/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepstep.errors import ConfigError
from keepstep.testing.conductor import LINK_DEAD_S, Drill, can_mount, conduct, reference
from keepstep.testing.etcd import MISSING
from keepstep.testing.faults import STORE_KINDS
from keepstep.testing.network import why_no_namespaces
from keepstep.testing.soak import Soak
from keepstep.testing.tally import tally
from keepstep.testing.turns import Shape, draw_turns, possible
from keepstep.testing.verdict import judge
from keepstep.testing.witness import DrillFacts

SCHEDULE_STEPS = 1000


def make(order: Drill, seconds: float, kinds: str) -> Soak:
    """A soak of this drill's job for so many `seconds`, which draws from `kinds`; empty means all
    that are possible here. Raises ConfigError."""
    if order.launcher != "run":
        raise ConfigError(f"--soak: expected --launcher run, found {order.launcher}")
    if order.etcd and MISSING:
        raise ConfigError(f"--rdzv-backend: {MISSING}")
    has_namespaces = order.nodes > 1 and order.namespaces is not False and not why_no_namespaces()
    can_fill_store = order.store is None and can_mount(order.work / "store")
    drawn = possible(kinds, order.nodes, has_namespaces, can_fill_store, order.etcd)
    shape = Shape(order.nodes, order.nproc, order.step_ms, LINK_DEAD_S * 1000)
    return Soak(
        seconds,
        shape,
        draw_turns(order.seed, shape, drawn),
        protects=order.nodes > 1 and order.policy != "none",
        fills_store="full" in drawn,
        roughens_store=not set(drawn).isdisjoint(STORE_KINDS),
    )


def run(
    order: Drill, soak: Soak, show: Callable[[int, int], None]
) -> tuple[DrillFacts, dict[str, Any]]:
    """What was seen, and the verdict's report with the soak's tally. `show` is told the step that
    was reached and how many faults are done.

    The job with its faults goes first: only it says how many steps the undisturbed one has to do.
    """
    order = replace(order, steps=SCHEDULE_STEPS, persist_s=0.0)
    facts = conduct(order, show, soak)
    ended = soak.stop_step is not None and facts.exit_code == 0
    expected = reference(replace(order, stop_step=soak.stop_step)) if ended else None
    report = judge(soak.faults, facts, expected)
    report["proved"] = report["proved"] and not soak.failure and report["recovered"]
    return facts, {
        **report,
        "soak": tally(soak.faults, soak.passed, soak.lasted_ns, report),
        "failure": soak.failure,
        "steps": soak.stop_step,
    }


def show(console: Console, report: dict[str, Any]) -> None:
    """Print what the soak adds up to."""
    console.print(_turns(report["soak"]))
    for line in _sentences(report):
        console.print(line, highlight=False, soft_wrap=True)
    if report["failure"]:
        console.print(Text(report["failure"], style="red"), soft_wrap=True)


def _turns(soak: dict[str, Any]) -> Table:
    """How long the recoveries took, by kind of fault."""
    table = Table(
        "fault",
        "count",
        "median s",
        "99 % s",
        "protected: median s",
        "99 % s",
        title="From a fault to a new step of every rank",
    )
    for name, row in (*soak["turns"].items(), ("all", soak["all_turns"])):
        times = [
            str(row[of][quantile]) if row[of] else ""
            for of in ("trained_s", "protected_s")
            for quantile in ("median", "p99")
        ]
        table.add_row(name, str(row["turns"]), *times)
    return table


def _sentences(report: dict[str, Any]) -> Iterator[str]:
    soak = report["soak"]
    yield (
        f"{soak['injected']} faults in {soak['lasted_s']} s ({soak['faults_per_minute']} a "
        f"minute), {soak['recovered']} recovered"
    )
    yield f"injected: {_counts(soak['injected_by_kind'])}"
    yield f"recoveries by steps lost: {_counts(soak['lost_steps'])}"
    beyond = _counts(soak["lost_steps_beyond_policy"]) or "none"
    yield f"the same, where more was lost than the policy survives: {beyond}"
    yield f"resumed from: {_counts(soak['sources'])}"
    for fault in report["faults"]:
        if not fault["injected"]:
            yield f"not injected: {fault['asked']}: {fault['evidence']}"
    for fault in report["faults"]:
        if fault["injected"] and not fault["seen"]:
            yield f"no evidence of {fault['asked']}: {fault['evidence']}"


def _counts(counts: dict[str, int]) -> str:
    """`0: 12, 1: 3`: how often which."""
    return ", ".join(f"{name}: {count}" for name, count in counts.items())
