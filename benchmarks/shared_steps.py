"""What does a rank at half speed cost a job whose ranks share micro-batches by speed?

    python benchmarks/shared_steps.py                # some minutes
    python benchmarks/shared_steps.py --rounds 1 --hidden 64 --json

Real ranks over gloo under `keepstep run` (`keepstep.testing.shared_job`), whose computing is
emulated by sleeping: four ranks on fewer processors would slow each other down by computing.
Gradients, what is sent and the reduction are real.

**Cost.** In one run: steps in which nobody is slow, then one rank takes twice as long for each
micro-batch. The median of the last steps against that of the steps before it became slow. Beside it
the same with a program that shares nothing, in turn, and with sums in any order. The hash of the
state at the end is compared with a run in which nobody is slow.

**Changes.** How many steps it takes until shares change, and whether they do where nobody is slow.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script

from keepstep.edge.os.journal import read_journal

SLOW_FROM, SETTLED_STEPS, LAST_STEPS = 40, 32, 40
STEPS = SLOW_FROM + SETTLED_STEPS + LAST_STEPS
WAYS = {"in order": [], "any order": ["--any-order"], "not shared": ["--even"]}
JOB_WITHIN_S = 600


def train(nproc: int, given: list[str]) -> dict[str, Any]:
    """One job to its end: what each step took its slowest rank, its hashes, changes of shares."""

    def command(home: Path) -> list[str]:
        return ["-m", "keepstep.testing.shared_job", str(home), *given]

    with harness.trained("shared", nproc, command, JOB_WITHIN_S) as home:
        ranks = [json.loads((home / f"rank-{rank}.json").read_text()) for rank in range(nproc)]
        events = list(read_journal(home / "state" / "shared" / "journal.jsonl"))
    steps = sorted(map(int, ranks[0]["took_ns"]))
    return {
        "hashes": [rank["hash"] for rank in ranks],
        "ms": [max(rank["took_ns"][str(step)] for rank in ranks) / 1e6 for step in steps],
        "changes": [event.data for event in events if event.kind == "rebalanced"],
    }


def cost(args: argparse.Namespace, way: str, seed: int) -> dict[str, Any]:
    """One run in which a rank becomes slow."""
    usual = [
        *("--steps", str(STEPS), "--total", str(args.total), "--micro-ms", str(args.micro_ms)),
        *("--hidden", str(args.hidden), "--seed", str(seed), *WAYS[way]),
    ]
    slow = ["--slow-rank", str(seed % args.ranks), "--slow-from", str(SLOW_FROM)]
    found = train(args.ranks, [*usual, *slow, "--factor", "2"])
    before = statistics.median(found["ms"][10:SLOW_FROM])
    after = statistics.median(found["ms"][-LAST_STEPS:])
    changes = [change for change in found["changes"] if change["step"] >= SLOW_FROM]
    report: dict[str, Any] = {
        "way": way,
        "before_ms": before,
        "after_ms": after,
        "cost": after / before - 1,
        "changed_after": changes[0]["step"] - SLOW_FROM if changes else None,
        "shares": changes[-1]["shares"] if changes else None,
        "changes_before": len(found["changes"]) - len(changes),
    }
    if way == "in order":
        undisturbed = train(args.ranks, usual)
        report["same_hash"] = len({*found["hashes"], *undisturbed["hashes"]}) == 1
        report["changes_undisturbed"] = len(undisturbed["changes"])
    return report


def run(args: argparse.Namespace) -> dict[str, Any]:
    return harness.in_turn(list(WAYS), args, lambda way, seed: cost(args, way, seed))


def show(report: dict[str, Any], args: argparse.Namespace) -> None:
    print(
        f"{args.ranks} ranks, {args.total} micro-batches of {args.micro_ms} ms; one at half speed"
    )
    for way in WAYS:
        runs = [one for one in report["runs"] if one["way"] == way]
        costs = [one["cost"] for one in runs]
        late = [one["changed_after"] for one in runs if one["changed_after"] is not None]
        line = (
            f"{way}: {100 * statistics.median(costs):+.1f} % (worst {100 * max(costs):+.1f} %) of "
            f"a step of {statistics.median(one['before_ms'] for one in runs):.1f} ms"
        )
        if late:
            line += f"; shares {runs[0]['shares']} after {max(late)} steps at most"
        if "same_hash" in runs[0]:
            same = sum(one["same_hash"] for one in runs)
            line += f"; {same} of {len(runs)} end in the hash of an undisturbed run"
        moved = sum(one["changes_before"] + one.get("changes_undisturbed", 0) for one in runs)
        print(f"{line}; {moved} changes while nobody was slow")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--total", type=int, default=28)
    parser.add_argument("--micro-ms", type=float, default=10.0)
    parser.add_argument("--hidden", type=int, default=4096, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    watch = harness.watch()
    report = run(args)
    harness.tell(watch.end(), report, args.json, lambda told: show(told, args))


if __name__ == "__main__":
    main()
