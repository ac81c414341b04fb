"""`keepstep drill`: does it hold? A small deterministic job, faults on purpose, and the same final
state as without them.

Comes in: a command line. Goes out: a report (rich or JSON) and an exit code: 0 proved, 1 not, 2 a
wrong command line, 3 a fault could not be injected here. The work is done in testing/.
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import typer

from keepstep.cli import drill_report, drill_soak
from keepstep.cli.drill_arguments import DrillArguments, build_drill, checked_faults
from keepstep.cli.parameters import from_arguments, takes
from keepstep.cli.progress_bar import counting_bar, timing_bar
from keepstep.dashboard.screen import Screen
from keepstep.edge.os.needs import check_torch
from keepstep.testing.conductor import Drill, conduct, reference
from keepstep.testing.faults import Fault
from keepstep.testing.verdict import judge
from keepstep.testing.witness import DrillFacts

PROVED = 0
FAILED = 1
CANNOT_INJECT = 3


@dataclass(frozen=True, slots=True)
class DrillOutcome:
    """What came of a drill: its faults, what was seen, and the report that is printed as JSON."""

    faults: Sequence[Fault]
    facts: DrillFacts
    report: dict[str, Any]


@takes(from_arguments(DrillArguments))
def drill(**given: Any) -> None:
    """Inject faults into a small training job, and prove that it ends as it does without them.

    Exit code 0: proved. 1: not proved. 2: wrong command line. 3: a fault could not be injected
    here.
    """
    check_torch("keepstep drill")
    arguments = DrillArguments(**given)
    faults = checked_faults(arguments)
    work = _work_directory(arguments)
    order = build_drill(arguments, faults, work)
    # SIGTERM ends the drill as Ctrl-C does: the job and its memory go first
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcome = _soak(order, arguments) if arguments.soak else _run(order, arguments)
    _print(outcome, arguments.json)
    raise typer.Exit(_leave(outcome, work, keeps_work=arguments.work is not None))


def exit_code(report: dict[str, Any]) -> int:
    """What a report means to a script."""
    if report["proved"]:
        return PROVED
    asked_in_vain = any(not fault["injected"] for fault in report["faults"])
    if asked_in_vain and (report["recovered"] or report["exit_code"] is None):
        return CANNOT_INJECT
    return FAILED


def _work_directory(arguments: DrillArguments) -> Path:
    if arguments.work is None:
        return Path(tempfile.mkdtemp(prefix="keepstep-drill-"))
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    return work


def _run(order: Drill, arguments: DrillArguments) -> DrillOutcome:
    """Once undisturbed, unless the hash is known, and once with the faults."""
    with counting_bar(not arguments.json) as bar:
        undisturbed = bar.add_task("undisturbed run, steps", total=order.steps)
        expected = arguments.reference_hash or reference(
            order, lambda step, _: bar.update(undisturbed, completed=step + 1)
        )
        bar.update(undisturbed, completed=order.steps)
        disturbed = bar.add_task("disturbed run, steps", total=order.steps)
        done = bar.add_task("faults", total=len(order.faults))

        def show(step: int, faults: int) -> None:
            bar.update(disturbed, completed=step + 1)
            bar.update(done, completed=faults)

        facts = conduct(order, show)
    report = judge(order.faults, facts, expected)
    return DrillOutcome(order.faults, facts, _with_order(report, order))


def _soak(order: Drill, arguments: DrillArguments) -> DrillOutcome:
    soak = drill_soak.make(order, arguments.soak, arguments.kinds)
    with timing_bar(not arguments.json) as bar:
        task = bar.add_task("soak", total=None)

        def show(step: int, faults: int) -> None:
            bar.update(task, description=f"soak: step {step}, {faults} faults")

        facts, report = drill_soak.run(order, soak, show)
    return DrillOutcome(soak.faults, facts, _with_order(report, order))


def _with_order(report: dict[str, Any], order: Drill) -> dict[str, Any]:
    """The verdict with its summary, and with what was asked for."""
    took_s = [seconds for seconds in report["recovery_s"] if seconds is not None]
    return {
        "max_lost_steps": max(report["lost_steps"], default=0),
        "recovery_s_median": round(median(took_s), 3) if took_s else None,
        "launcher": order.launcher,
        "nproc": order.nproc,
        "steps": order.steps,
        "seed": order.seed,
        "nodes": order.nodes,
        "policy": order.policy,
        **report,
    }


def _print(outcome: DrillOutcome, as_json: bool) -> None:
    if as_json:
        print(json.dumps(outcome.report))
        return
    console = Screen(highlight=False)
    drill_report.show(console, outcome.facts, outcome.report)


def _leave(outcome: DrillOutcome, work: Path, keeps_work: bool) -> int:
    """Remove what nobody asked to keep, or say where it is; the exit code."""
    code = exit_code(outcome.report)
    if code != PROVED:
        console = Screen(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"Journals and output of the job: {work / outcome.facts.job}")
    elif not keeps_work:
        shutil.rmtree(work, ignore_errors=True)
    return code
