"""How long do the simulations take?

    python benchmarks/simulator.py                 # a month of 100,000 GPUs, 5 policies, 20 seeds
    python benchmarks/simulator.py --json
    python benchmarks/simulator.py --protocol      # the real keepers of 128 nodes with 8 ranks
                                                   # each, steps of 30 s (docs/simulation.md);
                                                   # nothing is signed, messages are no bytes

prepare     Placing 12,500 nodes in racks under each policy.
draw        All failures of all seeds.
walk        Every policy through every seed's failures.
plan        `keepstep plan` for the same cluster: every candidate placed and computed.

One process, one core. Every line names the load average when it was measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from dataclasses import asdict, dataclass

import harness  # beside this file: it is started as a script

from keepstep.core.economics.costs import parse_cluster_policy
from keepstep.core.economics.planner import plan
from keepstep.model.units import MIB, MS_NS, S_NS
from keepstep.sim.economics.montecarlo import draw, prepare, walk
from keepstep.sim.economics.presets import preset
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.wire.network import Wires
from keepstep.sim.protocol.world.world import World

RANKS = 8  # of each node of the other simulation
STEP_NS = 30 * S_NS
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

    cases = [prepare(cluster, parse_cluster_policy(policy)) for policy in POLICIES]
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


def large(nodes: int, steps: int) -> RunPlan:
    """A job of which every rank and step counts, and what happens between steps happens seldom."""
    return RunPlan(
        nodes=nodes,
        ranks_per_node=RANKS,
        steps=steps,
        step_ns=STEP_NS,
        policy="copies:2",
        slots=4,
        scrub_every_s=0.0,
        link_dead_s=20.0,
        checks=False,
        wires=Wires(checks=False, light=True, halves=0.0),
        budget_bytes=64 * MIB,
        tick_ns=10 * S_NS,
        look_ns=STEP_NS,
        act_ns=S_NS // 2,
        loop_ns=200 * MS_NS,
        turn_ns=200 * MS_NS,
        start_ns=2 * S_NS,
        limit_ns=10**15,
    )


def measure_protocol(nodes: int, steps: int) -> str:
    """A large job without faults, once all train."""
    job = SimJob(large(nodes, steps), World(1))
    job.begin()
    job.world.run(20 * S_NS)  # all have met and voted
    # what stands now stands as long as the run: the collector need not walk it again and again
    gc.freeze()
    gc.set_threshold(500_000)
    began_s, began_ns = time.process_time(), job.world.now_ns
    outcome = job.finish()
    took_s = time.process_time() - began_s
    virtual_s = (outcome.virtual_ns - began_ns) / S_NS
    assert outcome.wrong is None, outcome.wrong
    each_us = took_s / (RANKS * nodes * steps) * 1e6
    return (
        f"{RANKS * nodes:,} ranks on {nodes} nodes, {steps} steps of 30 s, copies:2: "
        f"{virtual_s:.0f} s in {took_s:.1f} s of one core, "
        f"{virtual_s / took_s:.0f} times real time; {each_us:.0f} us a rank and step   load "
        f"{os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpus-100k")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--protocol", action="store_true", help="the other simulation")
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    watch = harness.watch()
    if options.protocol:
        print(measure_protocol(options.nodes, options.steps))
        harness.tell(watch.end())
        return
    lines = measure(options.preset, options.seeds, options.days)
    report = {"lines": [asdict(line) for line in lines]}
    harness.tell(watch.end(), report, options.json, lambda _: show(lines, options))


def show(lines: list[Line], options: argparse.Namespace) -> None:
    for line in lines:
        print(f"{line.what:8} {line.count:9,}   {line.wall_s:7.3f} s   load {line.load:.1f}")
    total_s = sum(line.wall_s for line in lines if line.what != "plan")
    print(
        f"{options.days:g} days of {options.preset}, {len(POLICIES)} policies, "
        f"{options.seeds} seeds: {total_s:.2f} s"
    )


if __name__ == "__main__":
    main()
