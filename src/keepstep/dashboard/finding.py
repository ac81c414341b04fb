"""Finding: which jobs there are on this node, what they left, and who lives in them.

Comes in: the directories where memory and journals lie. Goes out: frozen values. Never writes,
never proves.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from keepstep.config import Settings
from keepstep.edge.os.flock import is_held
from keepstep.edge.shm.memory import resident_bytes
from keepstep.edge.shm.status_pages import read_pages

PREFIX = "keepstep-"
# what is held for other nodes, and below which directory
SHELVES = {"copy": "held", "parity": "parity"}
# a job directory that its keeper (this process) was removing
_ENDING = re.compile(r"(.+)\.ending-(\d+)")


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job that has memory, a journal, or both; `changed_wall_ns` is the newest change to
    either."""

    name: str
    job_dir: Path
    journal_path: Path
    has_memory: bool
    changed_wall_ns: int


@dataclass(frozen=True, slots=True)
class Leftover:
    """A job directory, its size, what of that is held for other nodes, and who still lives in
    it."""

    job: str
    path: Path
    bytes: int
    held_bytes: int
    keeper_alive: bool
    ranks_alive: tuple[tuple[int, int], ...]  # (rank, process)

    @property
    def alive(self) -> bool:
        return self.keeper_alive or bool(self.ranks_alive)


def find_jobs(settings: Settings) -> list[FoundJob]:
    """Every job with memory below `arena_dir` or a journal below `state_dir`, the newest first. The
    settings' own job name is not asked."""
    names = {
        d.name[len(PREFIX) :]
        for d in _job_dirs(settings.arena_dir)
        if not _ENDING.fullmatch(d.name)
    }
    names |= {p.parent.name for p in settings.state_dir.glob("*/journal.jsonl")}
    found = []
    for name in names:
        job_dir, journal_path = (
            settings.arena_dir / f"{PREFIX}{name}",
            settings.state_dir / name / "journal.jsonl",
        )
        changed_ns = max(_changed_ns(journal_path), _changed_ns(job_dir))
        found.append(FoundJob(name, job_dir, journal_path, job_dir.is_dir(), changed_ns))
    return sorted(found, key=lambda job: (-job.changed_wall_ns, job.name))


def find_leftovers(settings: Settings) -> list[Leftover]:
    """Every job directory of this user, also those whose keeper died while removing them."""
    found = []
    for directory in _job_dirs(settings.arena_dir):
        ending = _ENDING.fullmatch(directory.name)
        name = (ending[1] if ending else directory.name)[len(PREFIX) :]
        living = tuple(
            (rank, status.pid if status else 0)
            for rank, (alive, status) in read_pages(directory).items()
            if alive
        )
        keeper_alive = is_held(directory / "keeper.lock") or (
            ending is not None and _is_keeper(ending[2])
        )
        held_bytes = sum(resident_bytes(directory / below) for below in SHELVES.values())
        found.append(
            Leftover(name, directory, resident_bytes(directory), held_bytes, keeper_alive, living)
        )
    return sorted(found, key=lambda leftover: leftover.path)


def _job_dirs(arena_dir: Path) -> list[Path]:
    return [d for d in arena_dir.glob(f"{PREFIX}*") if _is_own_directory(d)]


def _is_own_directory(path: Path) -> bool:
    try:
        facts = path.lstat()
    except FileNotFoundError:  # its keeper removed it at this moment
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()


def _is_keeper(pid: str) -> bool:
    try:
        return b"keepstep.runtime.keeper.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
