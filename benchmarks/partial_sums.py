"""What does a slow rank cost a job that does not wait for it, and what becomes of the loss?

    python benchmarks/partial_sums.py                # some minutes
    python benchmarks/partial_sums.py --rounds 1 --ranks 2 --json

Real ranks over gloo under `keepstep run` (`keepstep.testing.partial_job`), whose computing is
emulated by sleeping: four ranks on fewer processors would slow each other down by computing.
Gradients, what is sent and the sums are real.

**Cost.** In one run: steps in which nobody is slow, then one rank takes so many times as long. The
median of the last steps against that of the steps before it became slow, on the slowest rank, over
pairs of steps: who is late does two in the time of one. In turn: all wait
(DistributedDataParallel), partial sums that drop and that add what is late, local steps.

**Nobody is slow.** What a step takes beside DistributedDataParallel's, in the same turns: of the
steps before.

**Numbers.** The loss of a batch that nobody trains on, after as many steps.
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

SLOW_FROM, SETTLED_STEPS, LAST_STEPS = 40, 10, 60
STEPS = SLOW_FROM + SETTLED_STEPS + LAST_STEPS
WAYS = {
    "all wait": ["--way", "all"],
    "partial, drop": ["--late", "drop"],
    "partial, add": ["--late", "add"],
    "local steps": ["--way", "local", "--every", "8"],
}
JOB_WITHIN_S = 600


def train(nproc: int, given: list[str]) -> dict[str, Any]:
    """One job to its end: what each pair of steps took its slowest rank, and what it came to."""

    def command(home: Path) -> list[str]:
        return ["-m", "keepstep.testing.partial_job", str(home), *given]

    with harness.trained("partial", nproc, command, JOB_WITHIN_S) as home:
        ranks = [json.loads((home / f"rank-{rank}.json").read_text()) for rank in range(nproc)]
        events = list(read_journal(home / "state" / "partial" / "journal.jsonl"))
    took = [[rank["took_ns"][str(step)] for step in range(STEPS)] for rank in ranks]
    pairs = [max(sum(one[at : at + 2]) / 2e6 for one in took) for at in range(0, STEPS, 2)]
    late = [event.data["count"] for event in events if event.kind == "left-out"]
    return {
        "pairs_ms": pairs,
        "loss": ranks[0]["loss"],
        "late_at_least": max(late, default=0),
        "equal": len({rank["hash"] for rank in ranks}) == 1,
    }


def cost(args: argparse.Namespace, way: str, seed: int) -> dict[str, Any]:
    """One run in which a rank becomes slow."""
    given = [
        *("--steps", str(STEPS), "--compute-ms", str(args.compute_ms)),
        *("--hidden", str(args.hidden), "--seed", str(seed), *WAYS[way]),
        *("--slow-rank", str(seed % args.ranks), "--slow-from", str(SLOW_FROM)),
        *("--factor", str(args.factor)),
    ]
    found = train(args.ranks, given)
    pairs = found.pop("pairs_ms")
    before = statistics.median(pairs[5 : SLOW_FROM // 2])
    after = statistics.median(pairs[-LAST_STEPS // 2 :])
    found |= {"way": way, "before_ms": before, "after_ms": after, "seed": seed}
    return found | {"cost": after / before - 1}


def run(args: argparse.Namespace) -> dict[str, Any]:
    return harness.in_turn(list(WAYS), args, lambda way, seed: cost(args, way, seed))


def show(report: dict[str, Any], args: argparse.Namespace) -> None:
    print(
        f"{args.ranks} ranks, a step of {args.compute_ms} ms; one takes {args.factor} times as long"
    )
    usual = [one for one in report["runs"] if one["way"] == "all wait"]
    for way in WAYS:
        runs = [one for one in report["runs"] if one["way"] == way]
        costs = [one["cost"] for one in runs]
        ratios = [
            one["before_ms"] / other["before_ms"] - 1
            for one in runs
            for other in usual
            if one["seed"] == other["seed"]
        ]
        step_ms = statistics.median(one["before_ms"] for one in runs)
        print(
            f"{way}: {100 * statistics.median(costs):+.1f} % (worst {100 * max(costs):+.1f} %) of "
            f"a step of {step_ms:.1f} ms; while nobody is slow "
            f"{100 * statistics.median(ratios):+.1f} % beside all wait; loss "
            f"{statistics.median(one['loss'] for one in runs):.4f}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--compute-ms", type=float, default=40.0)
    parser.add_argument("--factor", type=float, default=2.0)
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
