"""Wrong numbers: how often they are found, named and undone, what looking costs, and how often
nothing was wrong.

    python benchmarks/wrong_numbers.py trials     # 60 plants: batch, weight, gradient, moment
    python benchmarks/wrong_numbers.py devices    # devices that err once, for 50 runs, for ever
    python benchmarks/wrong_numbers.py soak       # 10,000 steps in which nothing is wrong
    python benchmarks/wrong_numbers.py odd        # healthy programs that look wrong: 3,000 each
    python benchmarks/wrong_numbers.py cost       # a step with and without, in turns

Every training is `keepstep run` of `keepstep.testing.wrong_numbers` on two ranks that look at each
step; `soak`, `odd` and `cost` are of the default, as it is without any option. What is right is
known from the plants, which the job does not know of; the state in the end is compared with that of
a training without them, or without the same batches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import harness  # beside this file: it is started as a script
from demo_steps import DemoSteps, WrongNumbersSwitch  # beside this file, a script

from keepstep.edge.os.journal import read_journal
from keepstep.model.events import Event
from keepstep.testing.odd_programs import PROGRAMS
from keepstep.testing.wrong_numbers import Plant, Planting

RANKS, DEPTH = 2, 4
BLOCK_STEPS = 8  # of the steps that are looked at by default one is in each
EACH_STEP = ("--wrong-numbers", "skip", "--look-every-steps", "1")
CULPRITS = {"batch": "data", "weight": "model", "moment": "model", "gradient": "hardware"}
ALARMS = ("wrong-numbers", "run-again", "numbers-judged", "batch-skipped", "condemned", "restored")
LAYERS = ("model.0.weight", "model.2.weight", "model.5.weight", "model.8.weight")
PLANTS_A_RUN, FIRST_STEP, APART_STEPS = 12, 8, 5


@dataclass(frozen=True)
class Outcome:
    code: int
    digests: tuple[str, ...]
    events: list[Event]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


def train(room: Path, planting: Planting, *options: str) -> Outcome:
    room.mkdir(parents=True, exist_ok=True)
    words = (str(planting.write(room / "plan.json")), str(room / "results"))
    return run(room, "keepstep.testing.wrong_numbers", words, *EACH_STEP, *options)


def run(room: Path, module: str, words: Sequence[str], *options: str) -> Outcome:
    results = room / "results"
    results.mkdir(parents=True)
    arena = Path(tempfile.mkdtemp(prefix="keepstep-numbers-", dir="/dev/shm"))
    command = [sys.executable, "-m", "keepstep.cli.main", "run", "--job", "j", "--grace-s", "0"]
    command += ["--nproc-per-node", str(RANKS), "--arena-dir", str(arena), *options]
    command += ["--state-dir", str(room / "state"), "-m", module, *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(room / "log", "wb") as log:
        ended = subprocess.run(command, env=environ, stdout=log, stderr=log)
    arena.rmdir()
    digests = tuple(path.read_text() for path in sorted(results.iterdir()))
    return Outcome(ended.returncode, digests, list(read_journal(room / "state/j/journal.jsonl")))


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    z, p = 1.96, hits / trials
    middle = p + z * z / (2 * trials)
    spread = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return (middle - spread) / (1 + z * z / trials), (middle + spread) / (1 + z * z / trials)


def told(name: str, hits: int, trials: int) -> str:
    low, high = wilson(hits, trials)
    return f"{name}: {hits} of {trials} ({low:.1%} to {high:.1%})"


def draw(seed: int, sites: Sequence[str]) -> tuple[Plant, ...]:
    rng = random.Random(seed)
    return tuple(
        Plant(site, rng.randrange(RANKS), FIRST_STEP + APART_STEPS * n, rng.randrange(DEPTH))
        for n, site in enumerate(sites)
    )


def verdict_of(step: int, verdicts: Sequence[Event]) -> Event | None:
    """Where not each step was captured, a verdict is of several."""
    return next((e for e in verdicts if e.data["since"] <= step <= e.data["step"]), None)


def is_named(plant: Plant, verdicts: Sequence[Event]) -> tuple[bool, bool, bool]:
    """Whether class, rank and place are right."""
    event = verdict_of(plant.step, verdicts)
    if event is None:
        return False, False, False
    where = str(event.data["where"])
    is_place = LAYERS[plant.layer].removesuffix(".weight") in where
    if plant.site == "batch":
        is_place = f"batch {plant.step}" in event.why
    if where.startswith("optimizer."):  # a tensor of a snapshot, by its parameter's number
        is_place = f".{2 * plant.layer}." in where
    is_culprit = event.data["culprit"] == CULPRITS[plant.site]
    return is_culprit, event.data["rank"] == plant.rank, is_place


def trials(room: Path, count: int, seed: int) -> bool:
    """Plants of all sites, some of each in one training; the batches of step s is number s until a
    batch was left out before it."""
    rng = random.Random(seed)
    named, equal, runs, clean = [], 0, 0, True
    while len(named) < count:
        sites = ["batch", "weight", "gradient", "moment"] * (PLANTS_A_RUN // 4)
        rng.shuffle(sites)
        plants = draw(rng.randrange(10**6), sites)
        steps = plants[-1].step + 8
        left_out = [p for p in plants if p.site == "batch"]
        # A batch that was left out moves all later ones by one.
        placed = tuple(
            p if p.site != "batch" else Plant(p.site, p.rank, p.step + left_out.index(p), p.layer)
            for p in plants
        )
        found = train(room / f"run-{runs}", Planting(steps, placed))
        drop = tuple(p.step for p in placed if p.site == "batch")
        right = train(room / f"right-{runs}", Planting(steps, drop=drop), "--wrong-numbers", "off")
        verdicts = found.of("numbers-judged")
        for before, after in zip(plants, placed, strict=True):
            asked = Plant(after.site, after.rank, before.step, after.layer)
            results = is_named(asked, verdicts)
            if after.site == "batch":  # told by its place, which has moved
                event = verdict_of(before.step, verdicts)
                place = event is not None and f"batch {after.step} " in event.why
                results = (*results[:2], place)
            named.append((asked.site, *results))
            if not all(results):
                event = verdict_of(before.step, verdicts)
                print("  not right:", asked, None if event is None else event.why)
        equal += found.digests == right.digests and len(found.digests) == RANKS
        bad = {p.step for p in plants}
        resumed = [e.data["step"] for e in found.of("restored")]
        clean = clean and found.code == 0 and all(step not in bad for step in resumed)
        runs += 1
    named = named[:count]
    for site in CULPRITS:
        of_site = [n for n in named if n[0] == site]
        print(
            told(f"{site}: class, rank and place", sum(all(n[1:]) for n in of_site), len(of_site))
        )
    hits = sum(all(n[1:]) for n in named)
    print(told("all", hits, len(named)))
    print(told("trainings that end in the right state, on both ranks", equal, runs))
    print(f"a bad stamp was resumed from: {'never' if clean else 'YES'}")
    return hits == len(named) and equal == runs and clean


def devices(room: Path, count: int, seed: int) -> bool:
    """Devices that compute wrong in one run of a step, in 50, and in all from step k on."""
    rng = random.Random(seed)
    is_right = True
    for name, runs, expected in (("once", 1, "transient"), ("50 runs", 50, "transient")):
        plants = tuple(
            Plant("gradient", rng.randrange(RANKS), FIRST_STEP + 4 * n, rng.randrange(DEPTH), runs)
            for n in range(count)
        )
        steps = plants[-1].step + 6
        found = train(room / f"{runs}", Planting(steps, plants))
        right = train(room / f"right-{runs}", Planting(steps), "--wrong-numbers", "off")
        verdicts = {e.data["step"]: e.data for e in found.of("numbers-judged")}
        hits = 0
        for plant in plants:
            data = verdicts.get(plant.step, {})
            is_hit = (data.get("lasting"), data.get("rank")) == (expected, plant.rank)
            hits += is_hit
            if not is_hit:
                print("  not right:", plant, data)
        is_equal = found.digests == right.digests
        print(told(f"{name}: {expected}, its rank", hits, count), f"{is_equal=}", flush=True)
        is_right = is_right and hits == count and is_equal
    hits = 0
    for number in range(count):
        plant = Plant("gradient", rng.randrange(RANKS), rng.randrange(3, 9), runs=0)
        options = ("--budget", "device=0,crash=0")
        found = train(room / f"for-ever-{number}", Planting(20, (plant,)), *options)
        verdicts = [(e.data["lasting"], e.data["rank"]) for e in found.of("numbers-judged")]
        hits += verdicts[:1] == [("permanent", plant.rank)]
        if verdicts[:1] != [("permanent", plant.rank)]:
            print("  not right:", plant, verdicts)
    print(told("for ever: permanent, and its rank", hits, count))
    return is_right and hits == count


def soak(room: Path, steps: int, seed: int) -> bool:
    """Nothing is wrong: a warm-up, jumps of the learning rate, harder data, scaled gradients."""
    words = (str(Planting(steps, scaler=True, eventful=True).write(room / "plan.json")),)
    found = run(room, "keepstep.testing.wrong_numbers", (*words, str(room / "results")))
    alarms = [e.why for kind in ALARMS for e in found.of(kind)]
    print(f"{steps} steps on {RANKS} ranks: {len(alarms)} false alarms (exit code {found.code})")
    for why in alarms[:10]:
        print("  ", why)
    return not alarms and found.code == 0


def odd(room: Path, steps: int, seed: int) -> bool:
    """Nothing is wrong with any of them: no alarm, no step taken back, no batch left out."""
    is_right, total = True, 0
    for name in sorted(PROGRAMS):
        place = room / name
        words = (name, str(steps), str(place / "results"))
        found = run(place, "keepstep.testing.odd_programs", words)
        alarms = [e.why for kind in ALARMS for e in found.of(kind)]
        total += steps
        is_fine = not alarms and found.code == 0 and len(found.digests) == RANKS
        is_right = is_right and is_fine
        meant = f", {len(found.of('meant'))} meant" if found.of("meant") else ""
        print(f"{name}: {'right' if is_fine else 'WRONG'} (exit code {found.code}{meant})")
        for why in alarms[:3]:
            print("  ", why)
        if found.code:
            print((place / "log").read_text()[-800:])
        sys.stdout.flush()
    print(f"{total} steps of {len(PROGRAMS)} programs on {RANKS} ranks")
    return is_right


def steps_in_turns(results: Path, steps: int) -> None:
    """One rank of the demo's training, in blocks of steps in turns with and without the looks; what
    each block's steps took, of time and of the process's processor time, as JSON."""
    demo = DemoSteps()
    begun = demo.begin(steps)
    looks = WrongNumbersSwitch(demo.job)
    took: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for step in begun:
        block, place = divmod(step, BLOCK_STEPS)
        looking = block % 2 == 0
        if place == 0:
            looks.set(looking)
            began = time.perf_counter(), time.process_time()
        demo.train(step)
        if place == BLOCK_STEPS - 1 and block >= 2:  # the first ones are of another kind
            ended = time.perf_counter(), time.process_time()
            took[looking].append((ended[0] - began[0], ended[1] - began[1]))
    told = {"with": took[True], "without": took[False]}
    (results / f"rank-{demo.job.rank}").write_text(json.dumps(told))


def cost(room: Path, steps: int, seed: int) -> bool:
    """What looking costs a step of the demo: medians of neighbouring blocks' ratios."""
    results = room / "results"
    results.mkdir()
    arena = Path(tempfile.mkdtemp(prefix="keepstep-numbers-", dir="/dev/shm"))
    command = [sys.executable, "-m", "keepstep.cli.main", "run", "--job", "j", "--grace-s", "0"]
    command += ["--nproc-per-node", str(RANKS), "--arena-dir", str(arena)]
    command += ["--state-dir", str(room / "state"), __file__]
    command += ["steps", "--count", str(steps)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "RESULTS": str(results)}
    subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
    arena.rmdir()
    for path in sorted(results.iterdir()):
        took = json.loads(path.read_text())
        pairs = list(zip(took["with"], took["without"], strict=False))
        step_s = statistics.median(off[0] for _, off in pairs) / BLOCK_STEPS
        wall, cpu = (statistics.median(on[i] / off[i] for on, off in pairs) - 1 for i in (0, 1))
        print(
            f"{path.name}: {wall:+.2%} of a step's time, {cpu:+.2%} of its processor time "
            f"(median of {len(pairs)} pairs of {BLOCK_STEPS} steps; a step: {1000 * step_s:.0f} ms)"
        )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("what", choices=("trials", "devices", "soak", "odd", "cost", "steps"))
    parser.add_argument("--count", type=int, help="trials, of each kind, or steps of the soak")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.what == "steps":  # `cost` starts it
        steps_in_turns(Path(os.environ["RESULTS"]), args.count)
        return 0
    with tempfile.TemporaryDirectory(prefix="keepstep-numbers-") as name:
        room = Path(name)
        print(json.dumps(vars(args)), flush=True)
        watch = harness.watch()
        acts = {
            "trials": (trials, 60),
            "devices": (devices, 20),
            "soak": (soak, 10_000),
            "odd": (odd, 3_000),
            "cost": (cost, 320),
        }
        act, count = acts[args.what]
        is_right = act(room, args.count or count, args.seed)
        harness.tell(watch.end())
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
