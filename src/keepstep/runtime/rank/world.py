"""World: everything a rank touches, in one value. `runtime/rank/session.py` makes the real one,
`sim/` one of virtual time.

A `Rank` is called by one thread at a time, by whoever drives it (`runtime/rank/driver.py`). Three
executors run its work outside of these calls: `trainer` on the trainer's own thread, whenever the
program is inside keepstep; `background` beside it, one piece after the other in the order in which
they were submitted; `aside` beside both, for what takes long and no snapshot waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from keepstep.config import Settings
from keepstep.core.economics.retention import asks_for
from keepstep.model.messages.agent_rank import RegroupAt
from keepstep.model.snapshot import Phase
from keepstep.ports import (
    Agents,
    Clock,
    Executor,
    Groups,
    Journal,
    Keepers,
    LiveState,
    Memory,
    Timers,
)
from keepstep.runtime.job_name import job_hash


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Whose state this is. `local_world_size`: ranks on this node; `local_rank`: which of them this
    is, None where that is not known."""

    job: str
    uid: int
    rank: int
    world_size: int
    local_world_size: int
    local_rank: int | None = None

    @property
    def node_ranks(self) -> range:
        """Those of this node; empty where they are not known."""
        if not self.has_many_nodes:
            return range(self.world_size)
        if self.local_rank is None:
            return range(0)
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    @property
    def has_many_nodes(self) -> bool:
        return self.local_world_size < self.world_size

    @property
    def job_hash(self) -> bytes:
        return job_hash(self.job, self.uid)


@dataclass(frozen=True, slots=True)
class RankOptions:
    """What of the settings a rank needs."""

    job_dir: Path
    arena_dir: Path
    slots: int
    redundancy: str
    has_store: bool
    persist_every_steps: int
    keeps_by_loss: bool  # a rule of retention asks for the loss
    shows_profile: bool  # its collectives' use of the network, to the keeper
    grace_s: float  # so long memory is kept after a failing end
    fresh_run: str | None  # the run that is to start over; None: go on with what there is
    launch: str  # who trains on what this one has left may trust it to be the newest there is
    share_replicas: str = "off"
    digest_every_steps: int = 0  # 0: replicas are not compared
    on_difference: str = "tell"

    @staticmethod
    def of(settings: Settings, run: str = "", launch: str = "") -> RankOptions:
        """`run`: which run of the job this is; `launch`: which launch of it."""
        return RankOptions(
            job_dir=settings.job_dir,
            arena_dir=Path(settings.arena_dir),
            slots=settings.slots,
            redundancy=settings.redundancy,
            has_store=settings.store is not None,
            persist_every_steps=settings.persist_every_steps,
            keeps_by_loss=asks_for("loss", settings.keep),
            shows_profile=settings.interleave == "auto",
            grace_s=settings.grace_s,
            fresh_run=run if settings.fresh else None,
            launch=launch,
            share_replicas=settings.share_replicas,
            digest_every_steps=settings.digest_every_steps,
            on_difference=settings.on_difference,
        )


@dataclass(frozen=True, slots=True)
class RankWorld:
    """`agents` knows of none where no agent supervises this rank. `takes_place_at`: this process
    takes a lost rank's place, and meets its peers there. `available_bytes`: of memory, for slots.
    `proof_threads`: that prove a snapshot's blocks before it is loaded. `elsewhere`: which ranks of
    this training wait in another job's memory, in words; empty: nobody is known to.
    """

    clock: Clock
    timers: Timers
    memory: Memory
    journal: Journal
    keepers: Keepers
    agents: Agents
    live: LiveState
    groups: Groups
    trainer: Executor
    background: Executor
    aside: Executor
    available_bytes: Callable[[], int]
    pid: int
    has_agent: bool
    takes_place_at: RegroupAt | None = None
    proof_threads: int = 1
    elsewhere: Callable[[], str] = lambda: ""


class Trainer(Protocol):
    """The program whose rank this is, as the rank sees it."""

    def announce(self, phase: Phase, step: int) -> None:
        """The rank does this now. From any thread."""

    def changed(self) -> None:
        """The rank's stage, or whether it may begin a step, has changed."""
