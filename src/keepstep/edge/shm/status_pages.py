"""Pages: the status pages of all ranks of a job directory, for who looks once and is none of
them."""

from __future__ import annotations

import time
from pathlib import Path

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import ranks_in
from keepstep.edge.shm.status_page import StatusPage, status_path
from keepstep.model.snapshot import RankStatus

# a page read while its writer is interrupted is whole a moment later, a damaged one never
TRIES, TRY_EVERY_S = 5, 0.002


def read_pages(job_dir: Path) -> dict[int, tuple[bool, RankStatus | None]]:
    """(alive, what its page says) of every rank with a page, in order."""
    found = {}
    for rank in ranks_in(MEMORY, job_dir):
        try:
            page = StatusPage(MEMORY, status_path(job_dir, rank))
        except (OSError, ValueError):
            continue
        alive, status = page.alive(), page.read()
        for _ in range(TRIES - 1):
            if status or not alive:
                break
            time.sleep(TRY_EVERY_S)
            status = page.read()
        page.close()
        found[rank] = (alive, status)
    return found
