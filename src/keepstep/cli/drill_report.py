"""A drill's report, for a terminal.

Comes in: what the conductor saw and the verdict's report. Goes out: tables and sentences. Judges
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepstep.cli import drill_soak
from keepstep.model.units import S_NS, human_bytes
from keepstep.testing.witness import DrillFacts

# The events of the job's journals that a timeline shows.
SHOWN_EVENTS = {
    "checkpoint-damaged",
    "damaged",
    "fetched",
    "job-over",
    "keeper-ended",
    "keeper-lost",
    "keeper-restarted",
    "keeper-started",
    "next-step",
    "node-lost",
    "persist-failed",
    "rank-exited",
    "rank-left",
    "ranks-restarted",
    "restore-failed",
    "restore-offered",
    "resumed",
    "torn",
}
MAX_LINES = 60


def show(console: Console, facts: DrillFacts, report: dict[str, Any]) -> None:
    """Print the report."""
    if "soak" in report:
        drill_soak.show(console, report)
    else:
        console.print(_faults(report))
        _show_timeline(console, facts)
    for line in _sentences(report):
        console.print(line, highlight=False, soft_wrap=True)


def _faults(report: dict[str, Any]) -> Table:
    table = Table("fault", "target", "step", "phase", "seen", "evidence", title="Faults")
    for fault in report["faults"]:
        nodes = ", ".join(map(str, fault["nodes"]))
        target = f"node {nodes}" if fault["nodes"] else f"rank {fault['rank']}"
        table.add_row(
            fault["kind"],
            target,
            str(fault["step"]),
            fault["phase"],
            _seen(fault),
            fault["evidence"],
        )
    return table


def _seen(fault: dict[str, Any]) -> Text:
    return _yes_or_no(fault["seen"], "no" if fault["injected"] else "not injected")


def _show_timeline(console: Console, facts: DrillFacts) -> None:
    lines = [(e.mono_ns, e.who, e.why) for e in facts.events if e.kind in SHOWN_EVENTS]
    lines += [(int(n["mono_ns"]), "drill", f"fault {n['fault']}: {n['what']}") for n in facts.notes]
    if not lines:
        return
    lines.sort()
    table = Table("s", "who", "what", title="Timeline", box=None)
    for at_ns, who, why in lines[:MAX_LINES]:
        table.add_row(f"{(at_ns - lines[0][0]) / S_NS:.3f}", who, why)
    console.print(table)
    if len(lines) > MAX_LINES:
        console.print(f"{len(lines) - MAX_LINES} more lines are in the journals")


def _sentences(report: dict[str, Any]) -> Iterator[str | Text]:
    yield Text("recovered: ") + _yes_or_no(report["recovered"])
    yield Text("same final state: ") + _yes_or_no(report["bit_equal"])
    yield Text("at most one step lost per failure: ") + _yes_or_no(report["within_one_step"])
    yield f"hash                {report['hash']}"
    yield f"hash, undisturbed   {report['expected_hash']}"
    yield _totals(report)
    yield from _recoveries(report)
    for why in report["half_checkpoints"]:
        yield Text("half a checkpoint is taken for one: ", style="red") + Text(why)
    if report["left_over"]:
        yield Text("left behind: ", style="red") + Text(", ".join(report["left_over"]))


def _yes_or_no(value: bool, no: str = "no") -> Text:
    return Text("yes", style="green") if value else Text(no, style="red")


def _totals(report: dict[str, Any]) -> str:
    median_s = report["recovery_s_median"]
    took = "" if median_s is None else f"median {median_s:.2f} s from fault to next step; "
    return (
        f"{report['restarts']} restarts, at most {report['max_lost_steps']} steps lost in one; "
        f"{took}{report['captured_steps']} snapshots, {report['skipped_steps']} skipped, "
        f"{report['torn_steps']} torn"
    )


def _recoveries(report: dict[str, Any]) -> Iterator[str]:
    """Of those recoveries that lost a node or moved bytes between nodes."""
    for recovery in report["recoveries"]:
        if not recovery["lost_nodes"] and not recovery["fetched_bytes"]:
            continue
        nodes = ", ".join(map(str, recovery["lost_nodes"]))
        after = f"after the loss of node {nodes}" if nodes else "after a software failure"
        beyond = "" if recovery["covered"] else f", more than {report['policy']} survives"
        yield (
            f"{after}{beyond}: resumed with step {recovery['step']} from {recovery['source']}, "
            f"{human_bytes(recovery['fetched_bytes'])} from other nodes"
        )
