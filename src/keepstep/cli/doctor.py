"""`keepstep doctor`: whether this machine is fit for keepstep and training.

Starts no job, imports no torch, and changes nothing: what it writes is a file without a name in
each directory that a job would write to. As JSON: {"fit", "checks": {name: "ok", "warning",
"broken" or "unknown", ...}, "defects": [{"check", "severity", "found", "why", "fix"}, ...],
"unknown": [{"check", "found"}, ...]}; a check that finds several things has the worst of their
grades.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from keepstep.cli.job_choice import JsonOption, print_json
from keepstep.config import resolve
from keepstep.core.doctor.defect import Defect, Grade
from keepstep.core.doctor.examination import CheckResult, Examination, examine
from keepstep.core.parts.redactor import Redactor
from keepstep.dashboard.finding import find_leftovers
from keepstep.dashboard.screen import Screen
from keepstep.edge.doctor.host import Host
from keepstep.edge.doctor.machine import read_machine
from keepstep.edge.parts.probe import Targets
from keepstep.edge.parts.recorder import record
from keepstep.model.machine_facts import LeftMemory
from keepstep.model.units import counted

IS_UNFIT = 1
STYLES = {Grade.BROKEN: "red", Grade.WARNING: "yellow", Grade.UNKNOWN: "dim"}
WORST_FIRST = (Grade.BROKEN, Grade.WARNING, Grade.UNKNOWN)


def doctor(
    nodes: Annotated[
        int, typer.Option("--nnodes", min=1, help="How many nodes the job is to have.")
    ] = 1,
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Store to look at. Default: KEEPSTEP_STORE."),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds that names and nvidia-smi may take, each.")
    ] = 0.5,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every check, and what is not known.")
    ] = False,
    recording: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="DIR",
            help="Instead: write there what the probes of parts see, to be played elsewhere.",
        ),
    ] = None,
    record_s: Annotated[
        float, typer.Option("--record-s", min=1, metavar="SECONDS", help="For so long.")
    ] = 120.0,
    json: JsonOption = False,
) -> None:
    """Check whether this machine is fit for keepstep and training: what, why, and the fix.

    Exit code 0: nothing will break, though warnings may be there; 1: something will.
    """
    if recording is not None:
        _record(recording, record_s)
        return
    host = Host(wait_s=wait)
    found = examine(read_machine(host, os.environ, nodes, store, find_left))
    if json:
        print_json(_document(found))
    else:
        _print(Screen(highlight=False, soft_wrap=True), found, verbose)
    if not found.is_fit:
        raise typer.Exit(IS_UNFIT)


def _record(directory: Path, for_s: float) -> None:
    settings = resolve({}, os.environ, "doctor")
    store = settings.store
    disk = Path(store) if store is not None and os.path.isdir(store) else settings.state_dir
    disk.mkdir(parents=True, exist_ok=True)
    targets = Targets(settings.arena_dir, disk, os.getpid())
    console = Screen(highlight=False, soft_wrap=True)
    host = socket.gethostname()
    console.print(f"recording what the probes of parts see, for {for_s:g} s", style="dim")
    redactor = Redactor((host, host.partition(".")[0]))
    looks = record(targets, directory, for_s, redactor)
    for probe, count in sorted(looks.items()):
        console.print(Text(f"{probe:<9} {counted(count, 'look')}"))
    console.print(
        Text(
            f"{directory}: names, addresses and paths are left out; read it before you send it",
            style="bold",
        )
    )


def find_left(arena_dir: Path) -> Iterator[LeftMemory]:
    """What this user's dead jobs have left there."""
    for leftover in find_leftovers(arena_dir):
        if not leftover.alive:
            yield LeftMemory(leftover.job, leftover.bytes)


def _print(console: Console, found: Examination, verbose: bool) -> None:
    for grade in WORST_FIRST:
        for check, defect in found.of_grade(grade):
            if grade is not Grade.UNKNOWN or verbose:
                console.print(_line(check, defect))
    if verbose:
        for result in found.results:
            if not result.defects:
                console.print(Text(f"ok       {result.check}", style="dim"))
    console.print(Text(_summary(found), style="bold"))


def _line(check: str, defect: Defect) -> Text:
    head = Text(f"{defect.grade.value:<8} {check}: ", style=STYLES[defect.grade])
    if defect.grade is Grade.UNKNOWN:
        return head.append(defect.found)
    head.append(f"{defect.found}; {defect.why}. ", style="default")
    return head.append(f"Fix: {defect.fix}", style="bold default")


def _summary(found: Examination) -> str:
    fit = "This machine is fit" if found.is_fit else "This machine is not fit"
    counts = [
        f"{len(found.of_grade(Grade.BROKEN))} broken",
        counted(len(found.of_grade(Grade.WARNING)), "warning"),
        f"{len(found.of_grade(Grade.UNKNOWN))} not known",
    ]
    return f"{fit}: {counted(len(found.results), 'check')}, {', '.join(counts)}"


def _document(found: Examination) -> dict[str, Any]:
    told = [each for grade in WORST_FIRST[:2] for each in found.of_grade(grade)]
    return {
        "fit": found.is_fit,
        "checks": {result.check: _worst(result) for result in found.results},
        "defects": [
            {
                "check": check,
                "severity": defect.grade.value,
                "found": defect.found,
                "why": defect.why,
                "fix": defect.fix,
            }
            for check, defect in told
        ],
        "unknown": [
            {"check": check, "found": defect.found}
            for check, defect in found.of_grade(Grade.UNKNOWN)
        ],
    }


def _worst(result: CheckResult) -> str:
    grades = {defect.grade for defect in result.defects}
    return next((grade.value for grade in WORST_FIRST if grade in grades), "ok")
