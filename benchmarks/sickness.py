"""Is what makes a rank or a part of a machine sick named, and does training go on as before?

    python benchmarks/sickness.py                          # each kind three times: some 20 minutes
    python benchmarks/sickness.py --kinds hot,blind --trials 1

Each trial is a `keepstep drill` of one fault: a rank that gets a third of a processor
(`cpu-quota`), a GPU that is hot and a disk that is slow, both by a trace (`hot`, `disk-slow`), and
a prober that stands still (`blind`). Named is right when the node's agent says so of that rank or
part, after the fault; the drill also proves that the job ends in the bits of an undisturbed one. A
fault that cannot be injected here is told and counts for nothing. Links are in `links.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import harness  # beside this file: it is started as a script

from keepstep.sim.economics.confidence import share_interval

RANKS, STEP_MS = 2, 20
CANNOT = 3  # the drill's exit code
WITHIN_S = 900


@dataclass(frozen=True)
class Case:
    """fault: as the drill wants it, of a rank that a trial chooses. steps: of the job, so that who
    is to say it has the time (`docs/operations.md` says how much)."""

    fault: str
    steps: int


CASES = {
    "cpu-quota": Case("cpu-quota:rank={rank},step=200", 700),
    "hot": Case("hot:step=100", 2200),
    "disk-slow": Case("disk-slow:step=100", 7000),
    "blind": Case("blind:step=1200", 3200),  # the prober begins ten seconds after the ranks
}


def drilled(case: Case, seed: int, known: str | None) -> tuple[int, dict[str, Any]]:
    """One job with the fault: the drill's exit code and report. known: the undisturbed hash."""
    command = [sys.executable, "-m", "keepstep.cli.main", "drill", "--json", "--seed", "1"]
    command += ["--nproc", str(RANKS), "--steps", str(case.steps), "--step-ms", str(STEP_MS)]
    command += ["--fault", case.fault.format(rank=seed % RANKS)]
    command += ["--reference-hash", known] if known else []
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=WITHIN_S)
    return ended.returncode, json.loads(ended.stdout)


def row(kind: str, trials: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """What its trials came to."""
    here = [report for code, report in trials if code != CANNOT]
    cannot = [report["faults"][0]["evidence"] for code, report in trials if code == CANNOT]
    seen = [report["faults"][0] for report in here if report["faults"][0]["seen"]]
    return {
        "kind": kind,
        "trials": len(here),
        "named": len(seen),
        "bit_equal": sum(report["bit_equal"] for report in here),
        "restarts": sum(report["restarts"] for report in here),
        "said": seen[-1]["evidence"] if seen else "",
        "cannot": cannot,
    }


def run(kinds: Sequence[str], trials: int, seed: int) -> dict[str, Any]:
    rows = []
    for kind in kinds:
        case, known, found = CASES[kind], None, []
        for each in range(seed, seed + trials):
            found.append(drilled(case, each, known))
            known = found[-1][1]["expected_hash"]
        rows.append(row(kind, found))
    return {"rows": rows}


def told(found: dict[str, Any]) -> str:
    """A row as a line."""
    if not found["trials"]:
        return f"{found['kind']}: cannot be injected here: {found['cannot'][0]}"
    low, high = share_interval(found["named"], found["trials"])
    return (
        f"{found['kind']}: named in {found['named']} of {found['trials']} ({low:.0%} to "
        f"{high:.0%}), {found['bit_equal']} ended as an undisturbed run, {found['restarts']} "
        f"restarts{'; ' if found['said'] else ''}{found['said']}"
    )


def show(report: dict[str, Any]) -> None:
    for found in report["rows"]:
        print(told(found))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=",".join(CASES))
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(CASES):
        parser.error(f"--kinds: expected some of {', '.join(CASES)}, found {', '.join(unknown)}")
    watch = harness.watch()
    report = run(kinds, args.trials, args.seed)
    harness.tell(watch.end(), report, args.json, show)


if __name__ == "__main__":
    main()
