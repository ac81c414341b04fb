"""`keepstep compare`: two saved states tensor by tensor, or each of a history with the one before.

As JSON for two: {"a", "b": what is compared, "summary", "is_equal", "tensors": [tensor, ...]}, a
tensor being a `model.comparison.TensorFinding` field by field, its difference with its "drift".
For a history: {"histories": [[advance, ...], ...], "warnings"}, an advance being a
`core.comparison.verdict.Advance`; of a job's memory there is one history for each rank.

Exit code 0: equal, or every state of the history moved. 1: different, or one did not move. 2: what
was named cannot be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from keepstep.cli.compared_state import OpenState, history_named, rank_named, state_named
from keepstep.cli.job_choice import JsonOption, print_json
from keepstep.cli.progress_bar import bytes_bar
from keepstep.core.comparison.verdict import Advance, advance, are_equal, by_kinds, summary
from keepstep.dashboard import terminal
from keepstep.dashboard.document import as_json
from keepstep.dashboard.screen import Screen
from keepstep.model.comparison import Likeness, TensorFinding, TensorKind
from keepstep.model.decoding import on_a_screen

if TYPE_CHECKING:  # see `compared_state`
    from keepstep.edge.torch.comparison.saved import SavedState

WORDS = {
    Likeness.EQUAL: Text("equal", style="green"),
    Likeness.DIFFERENT: Text("different", style="bold red"),
    Likeness.ONLY_A: Text("only in A", style="yellow"),
    Likeness.ONLY_B: Text("only in B", style="yellow"),
    Likeness.SHAPE: Text("another shape", style="bold red"),
    Likeness.DTYPE: Text("another dtype", style="bold red"),
    Likeness.APART: Text("other parts", style="yellow"),
}
SHOWN_UNCHANGED = 5

A_HELP = (
    "A slot's file, a rank in memory (JOB:RANK@STEP) or a checkpoint (STORE@STEP, or its "
    "directory). Alone: a store, or a job with memory."
)


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=A_HELP)],
    b: Annotated[
        str | None,
        typer.Argument(
            metavar="[B]", help="Another one. Without it each state of A and the one before."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List equal tensors, too.")] = False,
    json: JsonOption = False,
) -> None:
    """Compare two saved states tensor by tensor, or find saves that wrote what was saved before.

    Exit code 1: they differ, or a save did.
    """
    is_good = _compare_history(a, json) if b is None else _compare_two(a, b, every, json)
    if not is_good:
        raise typer.Exit(1)


# -- two states


def _compare_two(a: str, b: str, every: bool, json: bool) -> bool:
    ranks = rank_named(a), rank_named(b)
    rank = next((rank for rank in ranks if rank is not None), None)
    with state_named(a, rank)() as one, state_named(b, rank)() as other:
        findings = findings_of(one, other)
    told = summary(findings)
    if json:
        is_equal = are_equal(findings)
        tensors = [_document(finding) for finding in findings]
        document = {"a": one.what, "b": other.what, "summary": told, "is_equal": is_equal}
        print_json({**document, "tensors": tensors})
        return is_equal
    console = Screen()
    console.print(Text(told, style="bold"), soft_wrap=True)
    console.print(Text(f"A: {one.what}\nB: {other.what}"), soft_wrap=True)
    if one.has_values is not other.has_values:
        console.print("The values beside the tensors are not compared: a slot has them as one.")
    listed = [f for f in findings if every or f.verdict is not Likeness.EQUAL]
    if listed:
        console.print(_table(listed))
    return are_equal(findings)


def findings_of(a: SavedState, b: SavedState) -> list[TensorFinding]:
    """What is said of each tensor and value. Raises DamageError, StoreError."""
    from keepstep.edge.torch.comparison.tensors import ApartError, Comparer

    has_values = a.has_values is b.has_values
    kinds: list[dict[str, TensorKind]] = [
        {n: t.kind for n, t in state.tensors.items() if has_values or not t.kind.is_value}
        for state in (a, b)
    ]
    comparer, findings = Comparer(), []
    alike = list(by_kinds(*kinds))
    read = {f.name: a.tensors[f.name].nbytes for f in alike if f.verdict is Likeness.EQUAL}
    with bytes_bar() as bar:
        task = bar.add_task(f"comparing step {b.step}", total=sum(read.values()))
        for finding in alike:
            if finding.verdict is Likeness.EQUAL:  # as far as it can be told without its bytes
                try:
                    pair = a.tensors[finding.name], b.tensors[finding.name]
                    found = comparer.difference(*pair)
                    if found is not None:
                        finding = replace(finding, verdict=Likeness.DIFFERENT, difference=found)
                except ApartError:
                    finding = replace(finding, verdict=Likeness.APART)
                bar.advance(task, read[finding.name])
            findings.append(finding)
    return findings


def _document(finding: TensorFinding) -> dict[str, Any]:
    found: dict[str, Any] = as_json(finding)
    if finding.difference is not None:
        drift = finding.difference.drift
        found["difference"]["drift"] = drift if drift is None or math.isfinite(drift) else None
    return found


def _table(findings: Sequence[TensorFinding]) -> Table:
    numbers = ("values differ", "greatest", "norm A", "norm B", "drift")
    made = terminal.table("tensor", "is", "type", *numbers, right=numbers)
    for finding in findings:
        kinds = [str(kind) for kind in (finding.a, finding.b) if kind is not None]
        row = [
            Text(on_a_screen(finding.name)),
            WORDS[finding.verdict],
            Text(" / ".join(dict.fromkeys(kinds))),
        ]
        found = finding.difference
        if found is not None:
            differ = f"{found.differing} of {found.values}"
            row.append(Text(f"{differ}, {found.unlike} not finite" if found.unlike else differ))
            for number in (found.max_abs, found.norm_a, found.norm_b, found.drift):
                row.append(Text("-" if number is None else f"{number:.4g}"))
        made.add_row(*row)
    return made


# -- a history


def _compare_history(word: str, json: bool) -> bool:
    histories = [_advances(states) for states in history_named(word)]
    warnings = [each.warning for advances in histories for each in advances if each.warning]
    if json:
        print_json({"histories": histories, "warnings": warnings})
        return not warnings
    console = Screen()
    states = sum(len(advances) for advances in histories)
    if not states:
        told = f"There is only one state in {word}, and nothing to compare it with."
    elif warnings:
        told = f"{len(warnings)} of {states} saves brought nothing new."
    else:
        told = f"Every save differs from the one before: {states} compared."
    console.print(Text(told, style="bold red" if warnings else "bold"), soft_wrap=True)
    for each in (each for advances in histories for each in advances):
        console.print(Text(_about(each)), soft_wrap=True)
        if each.warning:
            console.print(Text(f"warning: {each.warning}", style="bold red"), soft_wrap=True)
    return not warnings


def _advances(states: Sequence[OpenState]) -> list[Advance]:
    advances = []
    for older, newer in pairwise(states):
        with older() as before, newer() as after:
            findings = findings_of(before, after)
            steps = before.step, after.step
            advances.append(advance(before.what, after.what, *steps, findings))
    return advances


def _about(each: Advance) -> str:
    told = f"{each.after}, after step {each.from_step}: {len(each.unchanged)} of {each.tensors} "
    shown = ", ".join(each.unchanged[:SHOWN_UNCHANGED])
    more = len(each.unchanged) - SHOWN_UNCHANGED
    named = f": {on_a_screen(shown)}{f' and {more} more' if more > 0 else ''}" if shown else ""
    return f"{told}tensors unchanged{named}"
