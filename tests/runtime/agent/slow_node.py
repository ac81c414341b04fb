"""A node's ranks that write their step work pages, and its agent's eye on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keepstep.core.detection.stragglers import BLOCK_STEPS
from keepstep.core.economics.swap_price import ASSUMED
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.step_work_page import StepWorkWriter, work_path
from keepstep.model.events import INFO
from keepstep.model.parts import PartHealth
from keepstep.model.step_work import GroupEntries, Hindrance, Section, StepWork, Timing, WorkBlock
from keepstep.model.units import MS_NS, S_NS
from keepstep.runtime.agent.slow_ranks import TICK_NS, SlowRanks
from keepstep.runtime.agent.steps_board import StepsBoard
from tests.core.slow_steps import Steps
from tests.runtime.fakes import FakeExecutor, FakeJournal, FakeProbes

RANKS = 2


class Counted(FakeProbes):
    """Probes that count what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Hindrance()

    def hindrance(self, pid: int) -> Any:
        return lambda: self.counts


class Told(FakeJournal):
    """What an agent tells of its ranks' steps; that they are still learnt, apart."""

    def __init__(self) -> None:
        super().__init__()
        self.learning = FakeJournal()

    def record(self, kind: str, why: str, /, level: int = INFO, **data: Any) -> None:
        if data.get("doubt") == "learning":
            self.learning.record(kind, why, level, **data)
        else:
            super().record(kind, why, level, **data)


class Node:
    """Ranks that write their pages, and the agent's eye on them."""

    def __init__(
        self,
        home: Path,
        ranks: int = RANKS,
        world_size: int = 0,
        first_rank: int = 0,
        board: StepsBoard | None = None,
    ) -> None:
        self.journal, self.probes = Told(), Counted()
        self.why_no_swap = "the job has one node"
        self.executor = FakeExecutor()
        self.completed_step: int | None = None
        self.parts: tuple[PartHealth, ...] = ()
        self.swap_price = ASSUMED
        self.slow = SlowRanks(
            MEMORY,
            self.probes,
            self.executor,
            self.journal,
            home,
            lambda: self.why_no_swap,
            lambda: self.completed_step,
            lambda: self.parts,
            ("1", "0"),  # the first rank's device is the second one
            swap_price=lambda: self.swap_price,
        )
        self.home, self.looks, self.now_ns = home, 0, 0
        self.timing = Timing.HOST
        self.swaps: list[str] = []
        self.micro_batches = 0  # of each rank, a step
        self.pages: dict[int, StepWorkWriter] = {}
        self.pids = {rank: 100 + rank for rank in range(first_rank, first_rank + ranks)}
        for rank in self.pids:
            work_path(home, rank).parent.mkdir(parents=True)
            self.start(rank)
        self.slow.begin(self.pids, world_size or ranks, board)

    def start(self, rank: int) -> None:
        self.pages[rank] = StepWorkWriter(MEMORY, work_path(self.home, rank))
        self.pages[rank].begin(self.timing)

    def look(self) -> None:
        self.looks += 1
        self.now_ns += TICK_NS
        if why := self.slow.tick(self.now_ns):
            self.swaps.append(why)

    def train(self, run: Steps, steps: int, first: int = 0, epoch: int = 1, every: int = 7) -> None:
        """One record a step; a look after `every` steps."""
        for step in self.steps(run.blocks(steps), first, epoch):
            if step % every == every - 1:
                self.look()
        self.look()

    def steps(
        self, blocks_of: Iterator[tuple[int, dict[int, WorkBlock]]], first: int = 0, epoch: int = 1
    ) -> Iterator[int]:
        """One record a step, each block's work spread over its steps."""
        sums = {rank: _zero(first - 1, epoch) for rank in self.pages}
        for end, blocks in blocks_of:
            for step in range(end - BLOCK_STEPS + 1, end + 1):
                for rank, page in self.pages.items():
                    sums[rank] = _plus(
                        sums[rank], blocks[rank], first + step, epoch, self.micro_batches
                    )
                    page.write(sums[rank])
                self.completed_step = first + step
                yield step

    def close(self) -> None:
        self.slow.close()
        for page in self.pages.values():
            page.close()


UP_NS = 24 * 3600 * S_NS  # for so long the machine has been up


def _zero(step: int, epoch: int) -> StepWork:
    none = (0,) * len(Section)
    return StepWork(step, epoch, UP_NS, none, none, 0, none, 0, 0)


def _plus(sums: StepWork, block: Any, step: int, epoch: int, micro_batches: int) -> StepWork:
    share = lambda old, new: tuple(a + b // BLOCK_STEPS for a, b in zip(old, new, strict=True))  # noqa: E731
    return StepWork(
        step,
        epoch,
        sums.ended_ns + 50 * MS_NS,
        share(sums.own_ns, block.own_ns),
        share(sums.cpu_ns, block.cpu_ns),
        0,
        share(sums.delay_ns, block.delay_ns),
        sums.collectives + 3,
        sums.tokens + block.tokens // BLOCK_STEPS,
        sums.micro_batches + micro_batches,
        share(sums.device_ns, block.device_ns),
        (GroupEntries(1, sums.collectives + 3),),
    )
