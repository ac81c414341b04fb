"""Metering: what a node's metrics tell, read when somebody asks.

Comes in: status pages, the horizon, the keeper's lock and counts, what was added to the journal
since the last look. Goes out: a `Reading`. Never writes, never asks another process, and nothing
waits for it; a look costs what has happened since the last one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from keepstep.config import Settings
from keepstep.core.economics.goodput import Ledger, Tempo
from keepstep.core.resume.cut import cut, holding_of
from keepstep.edge.net.metrics_server import Exposition, Reading
from keepstep.edge.os.flock import is_held
from keepstep.edge.os.journal import JournalTail
from keepstep.edge.shm.collective_profile_page import COUNT_FILE, read_word
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY, resident_bytes
from keepstep.edge.shm.status_pages import read_pages
from keepstep.model.rhythm import Interleaved
from keepstep.model.snapshot import RankStatus

# what is held for other nodes, and below which directory
SHELVES = {"copy": "held", "parity": "parity"}
EVERYWHERE = "0.0.0.0"


class Metrics:
    """Made before the first event that is to count: what the journal had before is another
    run's."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tail = JournalTail(settings.journal_path, from_its_end=True)
        self._ledger = Ledger()
        self._lock = threading.Lock()  # two scrapes may come at once
        self._exposition: Exposition | None = None

    def start(self, port: int) -> int:
        """Serve on `port` of the node's `host` (0 chooses one): the port. Raises ConfigError."""
        self._exposition = Exposition(self.read, port, self._settings.host or EVERYWHERE)
        return self._exposition.port

    def stop(self) -> None:
        if self._exposition is not None:
            self._exposition.close()
            self._exposition = None

    def read(self) -> Reading:
        with self._lock:
            return self._look()

    def _look(self) -> Reading:
        job_dir = self._settings.job_dir
        for event in self._tail.read():
            self._ledger.add(event)
        ranks = read_pages(job_dir)
        living = [page for alive, page in ranks.values() if alive and page is not None]
        tempos = [
            Tempo(p.rank, p.pid, p.completed_step, p.step_ns_last, p.stall_ns_total) for p in living
        ]
        now_ns = self._ledger.axis.place(time.time_ns(), time.monotonic_ns())
        held = {kind: resident_bytes(job_dir / below) for kind, below in SHELVES.items()}
        return Reading(
            job=self._settings.job,
            ranks=ranks,
            committed_step=self._committed_step(ranks),
            keeper_alive=is_held(job_dir / "keeper.lock"),
            held_bytes={"own": max(0, resident_bytes(job_dir) - sum(held.values())), **held},
            spent_ns=self._ledger.account(tempos, now_ns).parts(),
            recoveries=tuple(
                (r.cause, r.took_ns, r.lost_steps) for r in self._ledger.recovered(now_ns)
            ),
            interleaved=read_word(MEMORY, job_dir / COUNT_FILE, Interleaved),
        )

    def _committed_step(self, ranks: Mapping[int, tuple[bool, RankStatus | None]]) -> int | None:
        """Of a job of several nodes the leader's word, of one node what its ranks hold."""
        pages = [page for _, page in ranks.values() if page is not None]
        world_size = max((page.world_size for page in pages), default=0)
        if not world_size:
            return None
        if world_size > len(pages):
            try:
                horizon = HorizonPage(MEMORY, self._settings.job_dir, make=False)
            except (OSError, ValueError):
                return None
            floor = horizon.read(max(page.epoch for page in pages)).floor
            horizon.close()
            return None if floor is None else floor.step
        common = cut([holding_of(page) for page in pages], world_size)
        return None if common is None else common.step
