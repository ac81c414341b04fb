"""Entry: how a process gets from a world of its own to a rank that stands where all others stand.

Comes in: who this rank is, what it protects, its world and its driver. Goes out: a rank that may
begin its first step, and on rank 0 the sentences about what is protected and where it goes on.

Never leaves a joined rank behind: whoever fails on the way has been abandoned or closed when the
error is raised.
"""

from __future__ import annotations

import os

from keepstep.config import Settings
from keepstep.edge.os.run_name import launch_name, run_name
from keepstep.edge.torch.opening_lines import position_line, protected_line, unserved_line
from keepstep.edge.torch.state import Protected
from keepstep.errors import KeepstepError
from keepstep.model.events import WARNING
from keepstep.ports import Journal
from keepstep.runtime.rank.driver import Driver
from keepstep.runtime.rank.joining import Joined, Joining
from keepstep.runtime.rank.process_world import node_facts
from keepstep.runtime.rank.rank import Rank
from keepstep.runtime.rank.stage import Stage
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld, Trainer


def join(
    settings: Settings,
    who: RankIdentity,
    protected: Protected,
    world: RankWorld,
    driver: Driver,
    trainer: Trainer,
) -> Rank:
    """Waits until this rank stands where all others stand. Raises KeepstepError."""
    options = RankOptions.of(settings, run_name(os.environ), launch_name(os.environ))
    joined = _joined(settings, who, world, driver, options)
    try:
        rank = Rank(world, options, who, joined, trainer)
    except BaseException:
        joined.close()
        raise
    try:
        driver.call(rank.begin)
        driver.wait(lambda: rank.stage is not Stage.STARTING)
        if rank.error is not None:
            raise rank.error
    except BaseException:
        rank.abandon()
        raise
    if who.rank == 0:
        _tell(rank, settings, who, protected, world.has_agent, world.journal)
    return rank


def _joined(
    settings: Settings,
    who: RankIdentity,
    world: RankWorld,
    driver: Driver,
    options: RankOptions,
) -> Joined:
    outcome: list[Joined | KeepstepError] = []

    def add(found: Joined | KeepstepError) -> None:
        outcome.append(found)
        driver.notify()

    driver.call(Joining(world, options, who, node_facts(settings), add, add).begin)
    driver.wait(lambda: bool(outcome))
    if isinstance(outcome[0], KeepstepError):
        raise outcome[0]
    return outcome[0]


def _tell(
    rank: Rank,
    settings: Settings,
    who: RankIdentity,
    protected: Protected,
    has_agent: bool,
    journal: Journal,
) -> None:
    journal.record("protected", protected_line(who.job, protected, rank.plan))
    where = position_line(rank.resumed, rank.loss)
    journal.record("goes-on", where, step=rank.step)
    unserved = unserved_line(settings.metrics_port, has_agent)
    if unserved:
        journal.record("no-metrics", unserved, WARNING)
