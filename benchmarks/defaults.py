"""What does all that looks for slow and sick cost together, as it is on by default?

    python benchmarks/defaults.py                # under five minutes
    python benchmarks/defaults.py --seconds 30

One job of two ranks under `keepstep run`, each pinned to a processor: the demo's training, with
`slow_ranks`, `sick_parts` and `wrong_numbers` as they are without any option. By turns blocks of
its steps run with all three and with none: in the ranks the step's clock and the looks at numbers
are taken out, and the prober stands still (`demo_steps.py` says what that leaves out). Both kinds
are steps of the same processes, so neither start-up nor where memory lies is between them. Told
are, of each rank:

* *a step*: all time of a block against that of its neighbour, the median over rounds;
* *its median* and *its p99*, of all steps of a kind (by default gradients are looked at in every
  eighth step: a block's median would not see it, the other two do);
* the trainer's processor time, likewise;

with what 95 of 100 draws of as many rounds, with repetition, give. Beside it the processor time
that agent, keeper and prober take while all is on, as a share of a core: all they do, snapshots
among it, and what of it is not there when it is off.

The target: under 0.5 % of a step, the whole interval, and under 1 % of a core. On a machine that
was not quiet there is no verdict (`harness.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script

JOB, RANKS = "defaults", 2
# Gradients are looked at in every eighth. A prober that is silent for 15 s is started anew, and may
# have said last that it lives 5 s before a block: a step may take a second.
BLOCK_STEPS = 8
SETTLED_S = 20.0  # the prober begins ten seconds after the ranks
TRIED_STEPS = 48
STEP_TARGET, CORE_TARGET = 0.005, 0.01
DRAWS = 1000
WHO = ("agent", "keeper", "prober")
RESULTS = "DEFAULTS_RESULTS"


@dataclass(frozen=True)
class Block:
    """So many steps with all on, or with none. `spans_s`: of each; `trainer_s`: the rank's
    processor time; `others_s`: that of agent, keeper and prober, as rank 0 read it."""

    is_on: bool
    spans_s: tuple[float, ...]
    trainer_s: float
    others_s: dict[str, float]

    @property
    def wall_s(self) -> float:
        return sum(self.spans_s)


Round = tuple[Block, Block]  # with, without


def rounds_of(blocks: Sequence[Block]) -> list[Round]:
    """Neighbours, the one with all on first."""
    pairs = zip(blocks[::2], blocks[1::2], strict=True)
    return [(a, b) if a.is_on else (b, a) for a, b in pairs]


def p99(spans: Sequence[float]) -> float:
    return statistics.quantiles(spans, n=100, method="inclusive")[98]


def _block_ratio(rounds: Sequence[Round]) -> float:
    return statistics.median(on.wall_s / off.wall_s for on, off in rounds)


def _trainer_ratio(rounds: Sequence[Round]) -> float:
    return statistics.median(on.trainer_s / off.trainer_s for on, off in rounds)


def _of_all(figure: Callable[[Sequence[float]], float]) -> Callable[[Sequence[Round]], float]:
    def ratio(rounds: Sequence[Round]) -> float:
        with_, without = (
            figure([span for each in rounds for span in each[kind].spans_s]) for kind in (0, 1)
        )
        return with_ / without

    return ratio


FIGURES: dict[str, Callable[[Sequence[Round]], float]] = {
    "a step": _block_ratio,
    "its median": _of_all(statistics.median),
    "its p99": _of_all(p99),
    "processor time": _trainer_ratio,
}


def figures(rounds: Sequence[Round], draws: int = DRAWS) -> dict[str, tuple[float, float, float]]:
    """By name: how much more it is with all on, as a share, and its 95 % interval."""
    rng = random.Random(1)
    drawn = [rng.choices(rounds, k=len(rounds)) for _ in range(draws)]
    found = {}
    for name, figure in FIGURES.items():
        ratios = sorted(figure(each) for each in drawn)
        low, high = ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]
        found[name] = (figure(rounds) - 1, low - 1, high - 1)
    return found


def cores(rounds: Sequence[Round]) -> dict[str, tuple[float, float]]:
    """Of agent, keeper and prober: shares of a core while all is on, and while nothing is. The
    prober looks as often in all as if it had never stood still: its share is that of all time."""
    on_s, off_s = (sum(each[kind].wall_s for each in rounds) for kind in (0, 1))
    found = {}
    for who in WHO:
        on, off = (sum(each[kind].others_s[who] for each in rounds) for kind in (0, 1))
        is_prober = who == "prober"
        found[who] = ((on + off) / (on_s + off_s), 0.0) if is_prober else (on / on_s, off / off_s)
    return found


# -- a rank


def rank_main(seconds: float) -> None:
    """Trains, and writes its blocks down: `rank-<r>.json`."""
    import torch
    from demo_steps import (
        DemoSteps,
        ProberSwitch,
        SlowRanksSwitch,
        Switch,
        WrongNumbersSwitch,
        all_at_once,
    )

    from keepstep.testing.uneven_job import pinned

    rank, mark = int(os.environ["RANK"]), os.environ[harness.MARK]
    pinned(int(os.environ["LOCAL_RANK"]))
    demo = DemoSteps()
    tried_s = [took_s(demo.compute) for _ in range(TRIED_STEPS)]
    counts = torch.tensor([SETTLED_S, seconds]) / statistics.median(tried_s)
    torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MIN)
    settled = int(counts[0])
    rounds = max(2, int(counts[1]) // (2 * BLOCK_STEPS))
    steps = demo.begin(settled + 2 * rounds * BLOCK_STEPS + 1)
    step = next(steps)

    def one_step() -> None:
        """From its body to the next one's."""
        nonlocal step
        demo.train(step)
        step = next(steps)

    for _ in range(settled):
        one_step()
    switches: list[Switch] = [SlowRanksSwitch(demo.job), WrongNumbersSwitch(demo.job)]
    pids = others(mark) if rank == 0 else {}
    if rank == 0:
        switches.append(ProberSwitch(pids["prober"]))
    set_all = all_at_once(switches)
    watch = harness.Watch(lambda: harness.cpu_s(harness.marked(mark))) if rank == 0 else None
    blocks, last_s = [], {who: harness.cpu_s([pid]) for who, pid in pids.items()}
    for name in (name for row in harness.turns(["on", "off"], rounds) for name in row):
        set_all(name == "on")
        trainer_s = time.process_time()
        spans = tuple(took_s(one_step) for _ in range(BLOCK_STEPS))
        trainer_s = time.process_time() - trainer_s
        now_s = {who: harness.cpu_s([pid]) for who, pid in pids.items()}
        took = {who: max(0.0, now_s[who] - last_s[who]) for who in pids}
        last_s = now_s
        blocks.append(Block(name == "on", spans, trainer_s, took))
    set_all(True)
    told: dict[str, Any] = {"blocks": [asdict(block) for block in blocks]}
    if watch is not None:
        told["noise"] = asdict(watch.end())
        lost = [who for who, pid in pids.items() if not Path(f"/proc/{pid}").exists()]
        told["lost"] = lost  # their figures are of a part of the time
    Path(os.environ[RESULTS], f"rank-{rank}.json").write_text(json.dumps(told))
    demo.train(step)
    assert next(steps, None) is None, "that was the last one"


def took_s(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def others(mark: str) -> dict[str, int]:
    """The node's processes beside the ranks, by who they are."""
    from keepstep.edge.os.processes import KEEPER_MODULE
    from keepstep.testing.part_faults import prober_of

    def is_keeper(pid: int) -> bool:
        return KEEPER_MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")

    [keeper] = [pid for pid in harness.marked(mark) if is_keeper(pid)]
    journal = Path(os.environ[RESULTS], "state", JOB, "journal.jsonl")
    return {"agent": os.getppid(), "keeper": keeper, "prober": prober_of(journal)}


# -- the run


def measure(seconds: float) -> dict[str, Any]:
    mark, load_before = uuid.uuid4().hex, os.getloadavg()[0]
    told: list[dict[str, Any]] = []

    def command(home: Path) -> list[str]:
        environ[RESULTS] = str(home)
        return [__file__, "--rank", "--seconds", str(seconds)]

    environ = {harness.MARK: mark, "OMP_NUM_THREADS": "1"}
    within_s = 10 * seconds + 120
    with harness.trained(JOB, RANKS, command, within_s, environ) as home:
        told = [json.loads((home / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    noise = replace(harness.Noise(**told[0]["noise"]), load_before=load_before)
    report: dict[str, Any] = {"noise": noise, "ranks": []}
    for each in told:
        blocks = [Block(**{**b, "spans_s": tuple(b["spans_s"])}) for b in each["blocks"]]
        rounds = rounds_of(blocks)
        step_s = statistics.median(span for _, off in rounds for span in off.spans_s)
        report["ranks"].append(
            {"rounds": len(rounds), "step_ms": 1e3 * step_s, "more": figures(rounds)}
        )
        if each is told[0]:
            report["cores"] = cores(rounds)
    report["lost"] = told[0]["lost"]
    return report


def verdict(report: dict[str, Any]) -> str:
    """A sentence."""
    if report["no_verdict"]:
        return str(report["no_verdict"])
    if report["lost"]:
        return f"no verdict: ended within the run: {', '.join(report['lost'])}"
    step, low, high = max(rank["more"]["a step"] for rank in report["ranks"])
    core = sum(on for on, _ in report["cores"].values())
    if core >= CORE_TARGET or low >= STEP_TARGET:
        word = "NOT met"
    else:
        word = "met" if high < STEP_TARGET else "open, more rounds would tell"
    return (
        f"{word}: {step:+.2%} of a step ({low:+.2%} to {high:+.2%}, target {STEP_TARGET:.1%}), "
        f"{core:.2%} of a core (target {CORE_TARGET:.0%})"
    )


def show(report: dict[str, Any]) -> None:
    for rank, found in enumerate(report["ranks"]):
        print(
            f"rank {rank}, {found['rounds']} rounds of two blocks of {BLOCK_STEPS} steps, "
            f"{found['step_ms']:.1f} ms each:"
        )
        for name, (more, low, high) in found["more"].items():
            print(f"  {name:15} {more:+.2%}  ({low:+.2%} to {high:+.2%})")
    for who, (on, off) in report["cores"].items():
        print(f"{who:8} {on:.2%} of a core, {off:.2%} while all is off")
    if report["lost"]:
        print(f"ended within the run, and measured until then: {', '.join(report['lost'])}")
    print(verdict(report))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="of measured steps")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank:
        rank_main(args.seconds)
        return
    report = measure(args.seconds)
    harness.tell(report["noise"], report, args.json, show)


if __name__ == "__main__":
    main()
