"""Keeper look: whether a node's keeper lives and does its part, as far as anybody can tell.

Comes in: the lock of the job directory, the keeper's beat, the time. Goes out: one value.

Invariant: a keeper that holds its lock and says nothing (it is stopped, or its loop is stuck) is
unknown, never alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keepstep.edge.os.flock import is_held
from keepstep.edge.shm.beat_files import read_keeper_beat
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.beats import SILENT_NS

LOCK = "keeper.lock"


@dataclass(frozen=True, slots=True)
class KeeperLook:
    """`alive`: None where nobody can tell. `pid`: who said last that it lives; None: nobody, or in
    another life of the machine. `silent_ns`: since then."""

    alive: bool | None
    pid: int | None = None
    silent_ns: int | None = None


def keeper_look(job_dir: Path, now_ns: int, boot: str) -> KeeperLook:
    """now_ns: of that boot's monotonic clock. Where nobody holds the lock there is no keeper."""
    if not is_held(job_dir / LOCK):
        return KeeperLook(False)
    beat = read_keeper_beat(MEMORY, job_dir)
    if beat is None or beat.boot != boot:
        return KeeperLook(None)
    silent_ns = max(0, now_ns - beat.at_ns)
    return KeeperLook(None if silent_ns > SILENT_NS else True, beat.pid, silent_ns)
