"""Metrics: what a node's metrics tell, read when somebody asks.

Comes in: status pages, the horizon, the keeper's counts, what was added to the journal since the
last look. Goes out: a `Reading`. Never writes, never asks another process, and nothing waits for
it; a look costs what has happened since the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from keepstep.core.detection.links_now import ELSEWHERE, LinksNow
from keepstep.core.detection.slow_now import SlowNow
from keepstep.core.economics.goodput import Ledger, StepTempo
from keepstep.core.parts.judgement import as_of
from keepstep.core.resume.cut import cut, holding_of
from keepstep.edge.net.metrics_server import Reading
from keepstep.edge.shm.collective_profile_page import COUNT_FILE, read_word
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.node_safety_file import read_node_safety
from keepstep.edge.shm.parts_file import read_parts
from keepstep.edge.shm.slot_store import SHELVES
from keepstep.model.events import Event
from keepstep.model.parts import PartsReport
from keepstep.model.rhythm import Interleaved
from keepstep.model.snapshot import RankStatus
from keepstep.model.topology import NoRedundancy
from keepstep.ports import Clock, Memory

Pages = Mapping[int, tuple[bool, RankStatus | None]]  # by rank: whether it lives, and its page


class JournalReader(Protocol):
    """What is added to the job's journal. `edge/os/journal.py` reads the file."""

    def read(self) -> Sequence[Event]:
        """Since the last look."""


class Metrics:
    """Of one node. For one thread at a time."""

    def __init__(
        self,
        job: str,
        job_dir: Path,
        clock: Clock,
        memory: Memory,
        journal: JournalReader,
        read_pages: Callable[[], Pages],
        keeper_lives: Callable[[], bool | None],
    ) -> None:
        """journal: begins with the first event that is to count: what was there before is another
        run's. keeper_lives: None: nobody can tell."""
        self._job = job
        self._job_dir = job_dir
        self._clock = clock
        self._memory = memory
        self._journal = journal
        self._read_pages = read_pages
        self._keeper_lives = keeper_lives
        self._ledger = Ledger()
        self._counted: Counter[str] = Counter()  # events, by kind
        self._stored_step: int | None = None
        self._slow = SlowNow()
        self._links = LinksNow()

    def read(self) -> Reading:
        """What there is to tell now."""
        for event in self._journal.read():
            self._take(event)
        ranks = self._read_pages()
        living = [page for alive, page in ranks.values() if alive and page is not None]
        tempos = [
            StepTempo(p.rank, p.pid, p.completed_step, p.step_ns_last, p.stall_ns_total)
            for p in living
        ]
        clock = self._clock
        keeper_alive = self._keeper_lives()
        now_ns = self._ledger.axis.place(clock.wall_ns(), clock.monotonic_ns(), clock.boot())
        account = self._ledger.account(tempos, now_ns)
        return Reading(
            job=self._job,
            ranks=ranks,
            committed_step=self._committed_step(ranks),
            keeper_alive=keeper_alive,
            held_bytes=self._held_bytes(),
            spent_ns=account.parts(),
            recoveries=tuple(
                (r.cause, r.took_ns, r.lost_steps) for r in self._ledger.recovered(now_ns)
            ),
            interleaved=read_word(self._memory, self._job_dir / COUNT_FILE, Interleaved),
            stored_step=self._stored_step,
            counted=self._counted,
            redundancy_is_off=self._redundancy_is_off(),
            slow_ratios=self._slow.excess_ratios(),
            slow_links=tuple((t.side, t.nodes, t.ratio) for t in self._links.slow()),
            damaged_counts=self._links.damaged_counts(),
            parts=self._parts(),
            unknown=tuple(self._unknown(keeper_alive)),
            unknown_losses=account.unknown_losses,
        )

    def _unknown(self, keeper_alive: bool | None) -> Iterator[tuple[str, str]]:
        if keeper_alive is None:
            yield "keeper", "silence"
        for event in self._slow.doubts():
            yield "slow ranks", str(event.data.get("doubt", ""))
        if self._links.is_silent(keeper_alive):
            yield "slow links", "silence"
            return
        for told in self._links.doubts():
            if told.doubt != ELSEWHERE:
                yield "slow links", told.doubt

    def _parts(self) -> PartsReport | None:
        report = read_parts(self._memory, self._job_dir)
        clock = self._clock
        return None if report is None else as_of(report, clock.monotonic_ns(), clock.boot())

    def _take(self, event: Event) -> None:
        self._ledger.add(event)
        self._slow.add(event)
        self._links.add(event)
        self._counted[event.kind] += 1
        step = event.data.get("step")
        if event.kind == "persisted" and isinstance(step, int):
            self._stored_step = step

    def _redundancy_is_off(self) -> bool | None:
        """None in a job of one node, or while nobody has told."""
        told = read_node_safety(self._memory, self._job_dir)
        return None if told is None else told.get("policy") == str(NoRedundancy())

    def _held_bytes(self) -> dict[str, int]:
        held = {kind: self._bytes_below(self._job_dir / below) for kind, below in SHELVES.items()}
        own = self._bytes_below(self._job_dir) - sum(held.values())
        return {"own": max(0, own), **held}

    def _bytes_below(self, directory: Path) -> int:
        """Of all files. They may be removed meanwhile."""
        total = 0
        for name in self._memory.names(directory):
            path = directory / name
            total += self._memory.size(path) + self._bytes_below(path)
        return total

    def _committed_step(self, ranks: Pages) -> int | None:
        """Of a job of several nodes the leader's word, of one node what its ranks hold."""
        pages = [page for _, page in ranks.values() if page is not None]
        world_size = max((page.world_size for page in pages), default=0)
        if not world_size:
            return None
        if world_size > len(pages):
            try:
                horizon = HorizonPage(self._memory, self._job_dir, make=False)
            except (OSError, ValueError):
                return None
            floor = horizon.read(max(page.epoch for page in pages)).floor
            horizon.close()
            return None if floor is None else floor.step
        common = cut([holding_of(page) for page in pages], world_size)
        return None if common is None else common.step
