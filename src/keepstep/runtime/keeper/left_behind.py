"""Left behind: what lies in this node's memory of the job at another world size.

Ranks look into directories of their own number. Where a job goes on with fewer ranks they get
other numbers, so what the larger one left may lie where none of them looks: among the slots of a
rank that is no more, or among what is held for other nodes. It cannot be loaded, and it must not be
taken for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from keepstep.edge.shm.slot import ranks_in, readable_headers
from keepstep.edge.shm.slot_store import SHELVES
from keepstep.model.snapshot import RankStatus, SlotState
from keepstep.ports import Memory


class LeftBehind(NamedTuple):
    """`world_size`: of a snapshot here; `completed_step`: how far its ranks here had come. None
    when there is nothing."""

    world_size: int | None = None
    completed_step: int | None = None


def left_behind(
    memory: Memory,
    job_dir: Path,
    job_hash: bytes,
    world_size: int,
    pages: Iterable[RankStatus],
) -> LeftBehind:
    """By a job of another size than `world_size`. `pages`: all that there are of ranks here."""
    found = _sealed_world_sizes(memory, job_dir, job_hash) - {world_size}
    completed = [s.completed_step for s in pages if s.world_size in found and s.completed_step >= 0]
    return LeftBehind(max(found, default=None), min(completed, default=None))


def _sealed_world_sizes(memory: Memory, job_dir: Path, job_hash: bytes) -> set[int]:
    found = set()
    for root in (job_dir, *(job_dir / below for below in SHELVES.values())):
        for rank in ranks_in(memory, root):
            for header in readable_headers(memory, root, rank):
                if header.state is SlotState.SEALED and header.job_hash == job_hash:
                    found.add(header.world_size)
    return found
