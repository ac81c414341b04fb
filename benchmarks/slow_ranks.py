"""Which slow ranks are named, how soon, how often wrongly, and at what price?

Real ranks over gloo under `keepstep run` (`keepstep.testing.uneven_job`), each pinned to a
processor as far as there are enough; what is counted is what the agent tells in its journal.

    python benchmarks/slow_ranks.py                               # all of it: an hour
    python benchmarks/slow_ranks.py --trials 3 --clean-steps 500
    python benchmarks/slow_ranks.py --ranks 2 --section forward backward update --json

**Named.** `--trials` jobs of each: one rank, drawn from the seed, does half as much again from a
step on (to be named within 50 steps of it), or a tenth more (within 500); batches of varied lengths
whose tokens are told. A trial is right when the first word is about that rank and its compute, and
its `told_step` lies within the limit. `--section forward` (`backward`, `update`): a step's work is
done there in three equal parts, and so much of the whole step is added to one of them.

Beside it stands in how many trials the processors themselves kept their speeds, by the program's
own clock (what a matrix product took each rank): where they come apart by more than 5 % for 50
steps, as those of virtual machines do now and then, nobody can tell a tenth.

**False alarms.** Clean steps, batches of varied lengths, their tokens told and not. Whether one was
false the same clock says: where a product took the rank longer, by half of what was told at least,
beside the others, its processor was slow, and the word is true.

**Cost.** Steps of one job of two ranks in blocks that are measured and blocks that are not, in
turn: the median of each round's ratio. What the marks of one step take on the trainer's thread;
what the agent takes to judge a block.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script

from keepstep.edge.os.journal import read_journal
from keepstep.model.events import Event
from keepstep.sim.economics.confidence import share_interval

SLOW_FROM = 200
CASES = {"+50 %": (1.5, 50), "+10 %": (1.1, 500)}  # factor, and within how many steps
JOB_WITHIN_S = 1200
PARTS = ("forward", "backward", "update")
SHORTEST = 0.25
WINDOW_STEPS, MOST_DRIFT = 50, 0.05
LEARNT_STEPS = 20  # as few as say what was before
MARGIN_STEPS = 60  # behind the limit, so that the last word is heard


Speeds = dict[int, list[float]]  # by rank, what a product took in each step


def train(nproc: int, given: list[str]) -> tuple[list[Event], Speeds]:
    """One job to its end: what its journal says, and how fast its processors were."""

    def command(home: Path) -> list[str]:
        return ["-m", "keepstep.testing.uneven_job", "--pin", "--speeds", str(home), *given]

    with harness.trained("slow", nproc, command, JOB_WITHIN_S) as home:
        events = list(read_journal(home / "state" / "slow" / "journal.jsonl"))
        speeds = {n: json.loads((home / f"rank-{n}").read_text()) for n in range(nproc)}
        return events, speeds


def slowed(speeds: Speeds, told: Event) -> float:
    """How much longer a product took the rank that was called slow, from then on until it was told,
    than before, beside the same of the others: 0.1 is a tenth. Where there is no before: than it
    took the others."""
    since, until = told.data["since_step"], told.data["told_step"] + 1
    median = statistics.median
    grown = {
        rank: median(took[since:until]) / (median(took[:since]) if since > LEARNT_STEPS else 1)
        for rank, took in speeds.items()
    }
    own = grown.pop(told.data["rank"])
    return own / median(grown.values()) - 1


def drift(speeds: Speeds) -> float:
    """How far the ranks' processors came apart by themselves, at most: what a product took one
    beside another, as the median of a window, beside what it took them before anybody was slow."""
    median = statistics.median
    before = {rank: median(took[:SLOW_FROM]) for rank, took in speeds.items()}
    steps = min(map(len, speeds.values()))
    most = 0.0
    for begin in range(0, steps - WINDOW_STEPS + 1, WINDOW_STEPS):
        window = slice(begin, begin + WINDOW_STEPS)
        grown = [median(took[window]) / before[rank] for rank, took in speeds.items()]
        most = max(most, max(grown) / min(grown) - 1)
    return most


def is_true(speeds: Speeds, told: Event) -> bool:
    """Whether its processor was slow, by half of what was told at least."""
    return slowed(speeds, told) >= told.data["excess_ratio"] / 2


def work_of(section: str, ms: float) -> list[str]:
    """What a step of so long does: all of it in its body, or in three parts."""
    if section == "compute":
        return ["--compute-ms", str(ms)]
    return ["--compute-ms", "0", *(f"--{part}-ms={ms / len(PARTS)}" for part in PARTS)]


def is_unknown(events: list[Event]) -> bool:
    """Whether it was said that nobody can tell, but for the time that is needed to learn."""
    told = [event for event in events if event.kind == "slow-unknown"]
    return any(event.data["doubt"] != "learning" for event in told)


def trial(
    nproc: int, section: str, factor: float, within_steps: int, seed: int, ms: float
) -> dict[str, Any]:
    """One job, one slow rank, whose step takes `factor` times as long for that section."""
    if section != "compute":
        factor = 1 + len(PARTS) * (factor - 1)
    slow_rank = random.Random(f"{seed}/{nproc}/{factor}").randrange(nproc)
    given = [
        *("--steps", str(SLOW_FROM + within_steps + MARGIN_STEPS), "--seed", str(seed)),
        *("--slow-rank", str(slow_rank), "--slow-from", str(SLOW_FROM), "--factor", str(factor)),
        *("--section", section, *work_of(section, ms)),
        *("--shortest", str(SHORTEST), "--tells-tokens"),
    ]
    events, speeds = train(nproc, given)
    told = [event for event in events if event.kind == "slow-rank"]
    others = [event for event in told if event.data["rank"] != slow_rank]
    first = told[0].data if told else {}
    after = first["told_step"] - SLOW_FROM + 1 if told else None
    is_right = first.get("rank") == slow_rank and first.get("section") == section
    return {
        "slow_rank": slow_rank,
        "named": first.get("rank"),
        "section": first.get("section"),
        "cause": first.get("cause"),
        "after_steps": after,
        "right": bool(is_right and after is not None and 0 < after <= within_steps),
        "wrong_words": len(others),
        "true_of_these": sum(is_true(speeds, event) for event in others),
        "unknown": is_unknown(events),
        "drift": round(drift(speeds), 3),
    }


def clean(
    nproc: int, section: str, steps: int, seed: int, ms: float, tells: bool
) -> dict[str, Any]:
    """One job in which nobody is slow."""
    given = ["--steps", str(steps), "--seed", str(seed), *work_of(section, ms)]
    given += ["--shortest", str(SHORTEST), *(["--tells-tokens"] if tells else [])]
    events, speeds = train(nproc, given)
    told = [event for event in events if event.kind == "slow-rank"]
    slower = [round(slowed(speeds, event), 3) for event in told]
    found = {"steps": steps, "tells": tells, "alarms": len(told)}
    found |= {"true": sum(is_true(speeds, event) for event in told), "slower": slower}
    found |= {"why": [event.why for event in told]}
    return {**found, "unknown": is_unknown(events)}


def marks_cost() -> dict[str, float]:
    """What the marks of one step take on this machine, with 3 collectives, in microseconds."""
    from keepstep.edge.os.thread_times import ThreadTimes
    from keepstep.edge.shm.memory import MEMORY
    from keepstep.edge.shm.step_work_page import StepWorkWriter
    from keepstep.model.step_work import Section
    from keepstep.runtime.rank.step_clock import StepClock

    home = Path(tempfile.mkdtemp(prefix="keepstep-slow-", dir="/dev/shm"))
    page = StepWorkWriter(MEMORY, home / "work")
    times = ThreadTimes()
    clock = StepClock(time.monotonic_ns, times.cpu_ns, times.delay_ns, page.write)
    spans: list[float] = []
    for step in range(4000):
        began = time.perf_counter_ns()
        clock.enter(Section.HOOK)
        clock.step_begun()
        clock.body_entered()
        clock.enter(Section.DATA)
        clock.back(Section.COMPUTE)
        before = clock.forward_begun()
        clock.forward_ended(before)
        clock.backward_begun()
        for _ in range(3):
            clock.busy(True)
            clock.busy(False)
        clock.backward_ended()
        clock.in_body()
        clock.enter(Section.HOOK)
        clock.enter(Section.UPDATE)
        clock.enter(Section.COMPUTE)
        clock.enter(Section.HOOK)
        clock.enter(Section.COMPUTE)
        clock.enter(Section.HOOK)
        clock.step_ended(step, 1, 3 * step)
        spans.append((time.perf_counter_ns() - began) / 1e3)
    page.close()
    times.close()
    shutil.rmtree(home)
    return {"median_us": statistics.median(spans), "p99_us": sorted(spans)[-40]}


def cost_worker(rank: int, home: str, rounds: int, ms: float) -> None:
    """Steps with the clock and without, in turn, in one job."""
    import torch
    from demo_steps import SlowRanksSwitch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import keepstep
    from keepstep.testing.uneven_job import SIDE, multiply, pinned, products_a_ms

    places = {"KEEPSTEP_JOB": "cost", "KEEPSTEP_ARENA_DIR": home, "KEEPSTEP_STATE_DIR": home}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571", "KEEPSTEP_GRACE_S": "0"}
    os.environ.update(**places, **ranks, **meets, KEEPSTEP_LOG="quiet")
    torch.set_num_threads(1)
    pinned(rank)
    keepstep.init_process_group()
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    weight = torch.randn(SIDE, SIDE) * 1.5 / SIDE**0.5
    times = round(ms * products_a_ms(weight))
    optimizer = torch.optim.AdamW(model.parameters())
    job = keepstep.protect(model=model, optimizer=optimizer)
    order = [name for row in harness.turns(["with", "without"], rounds) for name in row]
    block, warm = 40, 10
    steps = iter(job.steps(len(order) * block))
    first = next(steps)  # here the clock is made
    clock = SlowRanksSwitch(job)
    medians: dict[str, float] = {}
    ratios, plain = [], []
    for turn, name in enumerate(order):
        is_on = name == "with"
        clock.set(is_on)
        spans = []
        for number in range(block):
            began = time.perf_counter()
            step = first if turn == number == 0 else next(steps)
            with step:
                multiply(times, weight)
                optimizer.zero_grad()
                model(torch.randn(32, 64)).square().mean().backward()
                optimizer.step()
            if number >= warm:
                spans.append(time.perf_counter() - began)
        medians[name] = statistics.median(spans)
        plain += [] if is_on else spans
        if turn % 2:
            ratios.append(medians["with"] / medians["without"])
    job.close(ok=False)
    torch.distributed.destroy_process_group()
    if rank == 0:
        found = {"ratio": statistics.median(ratios), "rounds": len(ratios)}
        found["step_ms"] = 1e3 * statistics.median(plain)
        Path(home, "cost.json").write_text(json.dumps(found))


def cost(rounds: int, ms: float) -> dict[str, Any]:
    import torch.multiprocessing as mp

    home = tempfile.mkdtemp(prefix="keepstep-slow-", dir="/dev/shm")
    try:
        mp.spawn(cost_worker, (home, rounds, ms), nprocs=2)
        found: dict[str, Any] = json.loads(Path(home, "cost.json").read_text())
        return found
    finally:
        shutil.rmtree(home, ignore_errors=True)


def agent_cost(ranks: int) -> dict[str, float]:
    """What the judge takes for one block of that many ranks, in microseconds of processor time."""
    from keepstep.core.detection.stragglers import Stragglers
    from keepstep.model.step_work import Section, WorkBlock

    sections = len(Section)
    draw = random.Random(1)
    judge = Stragglers()
    blocks = []
    for _ in range(1000):
        blocks.append(
            {
                rank: WorkBlock(
                    5,
                    tuple(int(draw.gauss(5e7, 1e6)) for _ in range(sections)),
                    tuple(int(draw.gauss(5e7, 1e6)) for _ in range(sections)),
                    *(0, (0,) * sections, 15, 4096),
                )
                for rank in range(ranks)
            }
        )
    began = time.thread_time_ns()
    for number, block in enumerate(blocks):
        judge.add(block, 5 * number + 4)
    return {"block_us": (time.thread_time_ns() - began) / 1e3 / len(blocks), "ranks": ranks}


def run(args: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {"marks": marks_cost()}
    report["judge"] = [agent_cost(ranks) for ranks in (2, 8)]
    if args.rounds:
        report["cost"] = cost(args.rounds, args.cost_ms)
    report["named"], report["clean"] = [], []
    for nproc in args.ranks:
        for section, name in itertools.product(args.section, args.cases):
            factor, within = CASES[name]
            trials = []
            for seed in range(args.seed, args.seed + args.trials):
                trials.append(trial(nproc, section, factor, within, seed, args.compute_ms))
                if not args.json:
                    print(f"  {nproc} ranks, {section} {name}: {trials[-1]}", flush=True)
            row = {"ranks": nproc, "section": section, "case": name, "trials": trials}
            report["named"].append(row)
        for tells in (True, False):
            if args.clean_steps:
                where = args.section[0], args.clean_steps, args.seed, args.compute_ms
                found = clean(nproc, *where, tells)
                report["clean"].append({"ranks": nproc, **found})
    return report


def show(report: dict[str, Any]) -> None:
    for row in report["named"]:
        trials = row["trials"]
        right = sum(trial["right"] for trial in trials)
        low, high = share_interval(right, len(trials))
        late = [t["after_steps"] for t in trials if t["right"]]
        median = f"median {statistics.median(late):.0f}, at most {max(late)}" if late else "never"
        wrong = sum(t["wrong_words"] for t in trials)
        false = wrong - sum(t["true_of_these"] for t in trials)
        print(
            f"{row['ranks']} ranks, {row['section']} {row['case']}: {right} of {len(trials)} named "
            f"right in time ({100 * low:.0f} to {100 * high:.0f} %), "
            f"after {median} steps; {wrong} words about others, {false} of them false"
        )
        steady = [trial for trial in trials if trial["drift"] <= MOST_DRIFT]
        print(
            f"  the processors came apart by {MOST_DRIFT:.0%} or less in {len(steady)}; "
            f"of these it was right in {sum(trial['right'] for trial in steady)}"
        )
    for row in report["clean"]:
        how = "tokens told" if row["tells"] else "tokens not told"
        unknown = ", and it said that nothing can be told" if row["unknown"] else ""
        print(
            f"{row['ranks']} ranks, {row['steps']} clean steps of varied lengths, {how}: "
            f"{row['alarms']} alarms, {row['alarms'] - row['true']} of them false{unknown}"
        )
    if price := report.get("cost"):
        print(
            f"cost: {100 * (price['ratio'] - 1):+.2f} % of a step of {price['step_ms']:.1f} ms "
            f"({price['rounds']} rounds)"
        )
    marks = report["marks"]
    print(f"marks of a step: {marks['median_us']:.0f} us (p99 {marks['p99_us']:.0f}), ", end="")
    print(f"{100 * marks['median_us'] / 20_000:.2f} % of a step of 20 ms")
    for row in report["judge"]:
        print(f"the agent, {row['ranks']} ranks: {row['block_us']:.0f} us for a block of 5 steps")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    sections = ["compute", *PARTS]
    parser.add_argument("--section", nargs="*", default=sections[:1], choices=sections)
    parser.add_argument("--clean-steps", type=int, default=3000)
    parser.add_argument("--compute-ms", type=float, default=30.0, help="of the longest batch")
    parser.add_argument("--rounds", type=int, default=20, help="of cost; 0: none")
    parser.add_argument("--cost-ms", type=float, default=18.0, help="of a step whose cost is taken")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options(parser)
    args = parser.parse_args(argv)
    watch = harness.watch()
    report = run(args)
    harness.tell(watch.end(), report, args.json, show)


if __name__ == "__main__":
    main()
