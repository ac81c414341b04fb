"""Preflight report: a verdict as a table of 80 columns, lines that say what to do, or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from keepstep.core.preflight.catalogue import BY_CHECK, CHECK_OF, in_words
from keepstep.core.preflight.judgement import PreflightFinding
from keepstep.core.preflight.outliers import middle_of
from keepstep.model.decoding import on_a_screen
from keepstep.model.messages.preflight import CheckOutcome
from keepstep.model.units import counted, first_names
from keepstep.runtime.preflight.process import PreflightEnd

COLUMNS = 80
STYLES = {CheckOutcome.BAD: "red", CheckOutcome.UNKNOWN: "yellow", CheckOutcome.SKIPPED: "dim"}
WORST_FIRST = (
    CheckOutcome.BAD,
    CheckOutcome.UNKNOWN,
    CheckOutcome.SKIPPED,
    CheckOutcome.OK,
)
HEAD = ("check", "nodes", "figure", "median", "worst")
WIDTHS = (14, 17, 16, 13, 20)  # the last column is cut
assert sum(WIDTHS) == COLUMNS


def print_report(console: Console, end: PreflightEnd) -> None:
    """Table, findings, notes, and one line that sums up."""
    console.print(Text(_row(*HEAD), style="bold"))
    for name in BY_CHECK:
        if name in end.verdict.outcomes:
            for line in _rows(name, end):
                console.print(line)
    for finding in end.verdict.findings:
        console.print(_line(finding, end))
    for note in end.verdict.notes:
        console.print(Text(f"note     {on_a_screen(note)}", style="dim"))
    for node, readings in sorted(end.evidence.readings.items()):
        for reading in readings:
            if reading.outcome in (CheckOutcome.OK, CheckOutcome.SKIPPED) and _is_told(
                reading.found
            ):
                told = f"{reading.check} on node {node}: {on_a_screen(reading.found)}"
                console.print(Text(f"note     {told}", style="dim"))
    console.print(Text(summary(end), style="bold"))


def _is_told(found: str) -> bool:
    return found.startswith("warnings: ")


def summary(end: PreflightEnd) -> str:
    """One line."""
    nodes = len(end.evidence.hosts)
    defects = sum(f.outcome is CheckOutcome.BAD for f in end.verdict.findings)
    unknown = sum(CheckOutcome.UNKNOWN in row.values() for row in end.verdict.outcomes.values())
    fit = {0: "fit", 1: "not fit"}.get(end.verdict.exit_code, "not known to be fit")
    what = "This machine is" if nodes == 1 else f"{nodes} nodes are"
    return (
        f"{what} {fit}: {counted(len(end.evidence.planned), 'check')}, "
        f"{counted(defects, 'defect')}, {unknown} without an answer"
    )


def _rows(name: str, end: PreflightEnd) -> list[Text]:
    """One for each figure of a check, at least one."""
    outcomes = end.verdict.outcomes[name]
    worst = min(outcomes.values(), key=WORST_FIRST.index)
    count, nodes = list(outcomes.values()).count(worst), len(outcomes)
    told = f"{nodes} {worst.value}" if count == nodes else f"{count}/{nodes} {worst.value}"
    lines: list[str] = []
    for quantity in BY_CHECK[name].quantities:
        figures = end.verdict.figures.get(quantity.name)
        if figures:
            measure = quantity.measure
            node = _worst(figures, measure.is_better_high)
            median = in_words(measure, middle_of(list(figures.values())))
            last = f"{in_words(measure, figures[node])} (node {node})" if len(figures) > 1 else ""
            head = (name, told) if not lines else ("", "")
            lines.append(_row(*head, quantity.name, median, last))
    return [
        Text(line, style=STYLES.get(worst, "")) for line in lines or [_row(name, told, "", "", "")]
    ]


def _worst(figures: Mapping[int, int], is_better_high: bool) -> int:
    order = sorted(figures, key=lambda node: figures[node])
    return order[0] if is_better_high else order[-1]


def _row(*cells: str) -> str:
    shown = [cell[: width - 1].ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)]
    return "".join(shown).rstrip()


def _line(finding: PreflightFinding, end: PreflightEnd) -> Text:
    hosts = end.evidence.hosts
    where = first_names([f"node {node} ({hosts.get(node, '?')})" for node in finding.nodes])
    head = f"{finding.outcome.value:<8} {finding.check}: "
    text = Text(head, style=STYLES.get(finding.outcome, ""))
    told = f"{where}: " if len(hosts) > 1 else ""
    text.append(on_a_screen(f"{told}{finding.found}"), style="default")
    if finding.why:
        text.append(on_a_screen(f"; {finding.why}"), style="default")
    if finding.fix:
        text.append(on_a_screen(f". Fix: {finding.fix}"), style="bold default")
    return text


def as_document(end: PreflightEnd) -> dict[str, Any]:
    """See `cli/preflight.py`."""
    verdict, evidence = end.verdict, end.evidence
    return {
        "fit": verdict.exit_code == 0,
        "exit_code": verdict.exit_code,
        "node": end.node,
        "nodes": [
            {
                "node": node,
                "host": host,
                "checks": {
                    name: row[node].value for name, row in verdict.outcomes.items() if node in row
                },
            }
            for node, host in sorted(evidence.hosts.items())
        ],
        "figures": {
            name: {
                "check": CHECK_OF[name].name,
                "unit": evidence.quantities[name].measure.value,
                "floor": evidence.quantities[name].floor,
                "nodes": {str(node): value for node, value in figures.items()},
            }
            for name, figures in verdict.figures.items()
        },
        "findings": [
            {
                "check": finding.check,
                "outcome": finding.outcome.value,
                "nodes": list(finding.nodes),
                "hosts": [evidence.hosts.get(node, "") for node in finding.nodes],
                "found": finding.found,
                "why": finding.why,
                "fix": finding.fix,
            }
            for finding in verdict.findings
        ],
        "notes": list(verdict.notes),
    }
