"""Swarm: runs, one seed each, and what became of them.

`python -m keepstep.sim.protocol.swarm --seeds 0:1000` runs a thousand small clusters and counts;
`--seed 7` runs one and prints its trace: a seed that once failed fails in the same way again, at
the same commit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from keepstep.sim.protocol.checkers.account import AccountSumsUp
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.checkers.bytes import NoWrongBytes
from keepstep.sim.protocol.checkers.checkpoints import CheckpointsAreWhole
from keepstep.sim.protocol.checkers.commit import CommitsAreTrue
from keepstep.sim.protocol.checkers.cut import ACutExists
from keepstep.sim.protocol.checkers.given_up import GivenUp
from keepstep.sim.protocol.checkers.halted import AHaltEndsAlike
from keepstep.sim.protocol.checkers.hearing import AllIsHeard
from keepstep.sim.protocol.checkers.lease import OneCoordinator
from keepstep.sim.protocol.checkers.left_alone import WhoTrainsIsLeftAlone
from keepstep.sim.protocol.checkers.lost import LostSteps
from keepstep.sim.protocol.checkers.memory import MemoryWithinBudget
from keepstep.sim.protocol.checkers.missed import TheLostAreMissed
from keepstep.sim.protocol.checkers.progress import TheCutMoves
from keepstep.sim.protocol.checkers.shared_store import OtherTakesNothing, StoreIsShared
from keepstep.sim.protocol.checkers.unmoved import RunWitness, StrangersChangeNothing
from keepstep.sim.protocol.checkers.verdict import Verdicts
from keepstep.sim.protocol.checkers.writer import OneWriter
from keepstep.sim.protocol.faults.beside import Beside, BesideWatch
from keepstep.sim.protocol.faults.nemesis import Nemesis
from keepstep.sim.protocol.faults.strangers import Strangers
from keepstep.sim.protocol.job.job import SimJob, SimOutcome
from keepstep.sim.protocol.job.observer import Observer
from keepstep.sim.protocol.job.plan import RunPlan, small
from keepstep.sim.protocol.world.world import PortFault, World

TELL_EVERY = 500
CHECKERS = (
    NoWrongBytes,
    ACutExists,
    CommitsAreTrue,
    LostSteps,
    GivenUp,
    AllIsHeard,
    OneWriter,
    Verdicts,
    OneCoordinator,
    TheLostAreMissed,
    WhoTrainsIsLeftAlone,
    TheCutMoves,
    MemoryWithinBudget,
    AccountSumsUp,
    CheckpointsAreWhole,
    AHaltEndsAlike,
)


def run(seed: int, plan: RunPlan | None = None, fault: PortFault | None = None) -> SimOutcome:
    """One run, to its end. One with strangers is the same as without them, and is compared with
    that."""
    plan = plan or small(seed)
    alone = SimJob(replace(plan, strangers=False), World(seed, fault))
    if not plan.strangers:
        return _run(alone)
    witness = RunWitness(alone)
    outcome = _run(alone, witness)
    if outcome.wrong is not None:
        return outcome
    visited = SimJob(plan, World(seed, fault))
    Strangers(visited)
    return _run(visited, StrangersChangeNothing(visited, witness))


def _run(job: SimJob, *more: Observer) -> SimOutcome:
    """With whoever else uses its store."""
    if not job.plan.beside:
        watch(job, *more)
        Nemesis(job)
        return job.run()
    beside = Beside(job)
    atlas = Atlas(beside.other)
    others = (NoWrongBytes(beside.other, atlas), OtherTakesNothing(beside), BesideWatch(beside))
    beside.other.watch([atlas, *others])
    watch(job, *more, StoreIsShared(beside))
    Nemesis(job)
    try:
        beside.begin()
        return job.run()
    finally:
        beside.close()


def watch(job: SimJob, *more: Observer) -> None:
    """Have it judged by all checkers, and by these."""
    atlas = Atlas(job)
    job.watch([atlas, *(new(job, atlas) for new in CHECKERS), *more])


def replay_command(seed: int) -> str:
    return f"python -m keepstep.sim.protocol.swarm --seed {seed}"


def story(outcome: SimOutcome, lines: int = 60) -> str:
    """What a person needs to see of a run that failed."""
    return "\n".join(
        [
            f"seed {outcome.seed}: {outcome.wrong}",
            *outcome.trace[-lines:],
            f"again: {replay_command(outcome.seed)}",
        ]
    )


def many(
    seeds: Iterable[int], within_s: float, tell: bool = True, how: Callable[[int], SimOutcome] = run
) -> tuple[int, list[SimOutcome], Counter[str]]:
    """(runs, those that failed, totals) of as many seeds as there is time for."""
    failed: list[SimOutcome] = []
    totals: Counter[str] = Counter()
    runs = 0
    until = time.monotonic() + within_s
    for seed in seeds:
        outcome = how(seed)
        runs += 1
        totals.update(
            faults=outcome.faults,
            events=outcome.events,
            virtual_s=outcome.virtual_ns // 10**9,
            lost_steps=outcome.lost_steps,
        )
        if outcome.wrong is not None:
            failed.append(outcome)
            if tell:
                print(f"seed {seed}: {outcome.wrong.splitlines()[0]}", flush=True)
        if tell and runs % TELL_EVERY == 0:
            print(
                f"{runs} runs, {len(failed)} with a violation, {totals['faults']} faults",
                flush=True,
            )
        if time.monotonic() > until:
            break
    return runs, failed, totals


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m keepstep.sim.protocol.swarm", description=__doc__
    )
    parser.add_argument("--seed", type=int, help="run this one, and print how it went")
    parser.add_argument("--seeds", default="0:1000", help="first:end")
    parser.add_argument("--digests", help="first:end: what each run comes to, in one number")
    parser.add_argument("--within-s", type=float, default=float("inf"))
    parser.add_argument("--lines", type=int, default=400, help="of the trace")
    given = parser.parse_args()
    if given.seed is not None:
        outcome = run(given.seed)
        print("\n".join(outcome.trace[-given.lines :]))
        print(
            f"seed {outcome.seed}: {outcome.wrong or 'nothing was violated'}; digest "
            f"{outcome.digest:08x}, {outcome.faults} faults"
        )
        return outcome.wrong is not None
    first, end = map(int, (given.digests or given.seeds).split(":"))
    if given.digests is not None:
        for seed in range(first, end):
            print(f"{seed} {run(seed).digest:08x}")
        return 0
    began = time.monotonic()
    runs, failed, totals = many(range(first, end), given.within_s)
    took_s = time.monotonic() - began
    print(
        f"{runs} runs, {len(failed)} with a violation; {totals['faults']} faults, "
        f"{totals['events']} events, "
        f"{totals['virtual_s']} s of virtual time, {totals['lost_steps']} lost steps in "
        f"{took_s:.1f} s"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
