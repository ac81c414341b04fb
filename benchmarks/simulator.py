"""How long does the statistical simulation take?

    python benchmarks/simulator.py                 # a month of 100,000 GPUs, 5 policies, 20 seeds
    python benchmarks/simulator.py --json

prepare     Placing 12,500 nodes in racks under each policy.
draw        All failures of all seeds.
walk        Every policy through every seed's failures.
plan        `keepstep plan` for the same cluster: every candidate placed and computed.

One process, one core. Every line names the load average when it was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass

from keepstep.core.economics import parse_protection
from keepstep.core.planning import plan
from keepstep.sim.montecarlo import draw, prepare, walk
from keepstep.sim.presets import preset

POLICIES = ("store:3h", "store:max", "copies:2", "parity:4", "copies:2/in-process/store:10m")


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    count: int
    wall_s: float
    load: float


def measure(name: str, seeds: int, days: float) -> list[Line]:
    cluster = preset(name)
    lines = []
    started = time.perf_counter()

    def done(what: str, count: int) -> None:
        nonlocal started
        now = time.perf_counter()
        lines.append(Line(what, count, now - started, os.getloadavg()[0]))
        started = time.perf_counter()

    cases = [prepare(cluster, parse_protection(policy)) for policy in POLICIES]
    done("prepare", len(cases))
    drawn = [draw(cluster, days, seed) for seed in range(seeds)]
    done("draw", sum(map(len, drawn)))
    for seed, failures in enumerate(drawn):
        for case in cases:
            walk(cluster, case, failures, days, seed)
    done("walk", len(cases) * sum(map(len, drawn)))
    found = plan(cluster)
    done("plan", len(found.candidates))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpus-100k")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lines = measure(options.preset, options.seeds, options.days)
    if options.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
        return
    for line in lines:
        print(f"{line.what:8} {line.count:9,}   {line.wall_s:7.3f} s   load {line.load:.1f}")
    total_s = sum(line.wall_s for line in lines if line.what != "plan")
    print(f"{options.days:g} days of {options.preset}, {len(POLICIES)} policies, {options.seeds} seeds: {total_s:.2f} s")


if __name__ == "__main__":
    main()
