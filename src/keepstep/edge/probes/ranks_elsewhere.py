"""Ranks elsewhere: ranks of this very training, on this machine, that wait in another job's memory
than this process's, because their program names another job or another arena.

Comes in: the memory of one's own job, where the launcher says that all ranks meet. Goes out: which
ranks wait elsewhere, and where. Reads processes and pages of this user's; changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from keepstep.config import job_dir_of
from keepstep.edge.os.job_directory import is_own_job_dir
from keepstep.edge.os.processes import KEEPER_MODULE
from keepstep.edge.shm.status_pages import read_pages
from keepstep.model.decoding import a_text, an_object, from_json
from keepstep.model.snapshot import Phase

PROC = Path("/proc")
MEETING = ("MASTER_ADDR", "MASTER_PORT")  # equal for all ranks of one training, and for no other
WAITS = (Phase.STARTING, Phase.RESTORE)  # who trains is of another training in the same processes


class RankElsewhere(NamedTuple):
    rank: int
    pid: int
    job_dir: Path


def ranks_elsewhere(job_dir: Path, environ: Mapping[str, str]) -> list[RankElsewhere]:
    """Those that wait to begin under another name. Nothing where the launcher says of no meeting
    place, or where their processes cannot be looked at."""
    here = {f"{name}={environ.get(name)}".encode() for name in MEETING}
    if not all(environ.get(name) for name in MEETING):
        return []
    return [
        RankElsewhere(rank, status.pid, other)
        for other in sorted(set(_job_dirs()) - {job_dir})
        for rank, (is_alive, status) in read_pages(other).items()
        if is_alive and status is not None and status.phase in WAITS and here <= _said(status.pid)
    ]


def _job_dirs() -> Iterator[Path]:
    """In which a keeper of this user's is."""
    for pid in filter(str.isdigit, os.listdir(PROC)):
        try:
            line = (PROC / pid / "cmdline").read_bytes().decode(errors="replace")
            if KEEPER_MODULE not in line or (PROC / pid).stat().st_uid != os.geteuid():
                continue
            said = an_object(from_json(line.partition(f"{KEEPER_MODULE}\0")[2].partition("\0")[0]))
            job_dir = job_dir_of(Path(a_text(said["arena_dir"])), a_text(said["job"]))
        except (OSError, ValueError, KeyError):
            continue  # a command that only names it, or it has just ended
        if is_own_job_dir(job_dir):
            yield job_dir


def _said(pid: int) -> set[bytes]:
    """A process's environment as it was started; empty for another user's."""
    try:
        return set((PROC / str(pid) / "environ").read_bytes().split(b"\0"))
    except OSError:
        return set()
