"""Finding: which jobs there are on this node, what they left, and which processes still live there.

Comes in: the directories of memory and of journals. Goes out: frozen values. Never writes, never
proves.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.config import ENDING, user_dir
from keepstep.edge.os.flock import is_held
from keepstep.edge.os.job_directory import is_own
from keepstep.edge.os.processes import KEEPER_MODULE
from keepstep.edge.shm.memory import MEMORY, resident_bytes
from keepstep.edge.shm.slot_store import SHELVES
from keepstep.edge.shm.status_pages import read_pages

# a job directory that its keeper (this process) is removing
_ENDING = re.compile(rf"(.+){ENDING}(\d+)")


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job that has memory, a journal, or both. `changed_wall_ns`: when either was changed last.
    `owner`: whose the journal must be to be read, None where a person has named the file."""

    name: str
    job_dir: Path
    journal_path: Path
    has_memory: bool
    changed_wall_ns: int
    owner: int | None = field(default_factory=os.geteuid)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A job's memory and the processes that still live there.

    bytes: its size. held_bytes: the part of it that is held for other nodes. ranks_alive: (rank,
    process) pairs.
    """

    job: str
    path: Path
    bytes: int
    held_bytes: int
    keeper_alive: bool
    ranks_alive: tuple[tuple[int, int], ...]

    @property
    def alive(self) -> bool:
        """Whether any process lives there."""
        return self.keeper_alive or bool(self.ranks_alive)


def find_jobs(arena_dir: Path, state_dir: Path) -> list[FoundJob]:
    """Every job with memory below `arena_dir` or a journal below `state_dir`, the newest first. A
    journal is a file of this user's, or of whose the state directory is where the job has no memory
    here; and so is the directory that it is in."""
    living = {path.name for path in _job_dirs(arena_dir) if not _ENDING.fullmatch(path.name)}
    journals = {
        name: facts
        for name in MEMORY.names(state_dir)
        if (facts := _journal_facts(state_dir / name / "journal.jsonl", state_dir)) is not None
    }
    found = []
    for name in living | journals.keys():
        job_dir = user_dir(arena_dir) / name
        has_memory, journal = name in living, journals.get(name)
        told_ns = 0 if journal is None else journal.st_mtime_ns
        changed_ns = max(told_ns, _changed_ns(job_dir) if has_memory else 0)
        owner = os.geteuid() if has_memory or journal is None else journal.st_uid
        journal_path = state_dir / name / "journal.jsonl"
        found.append(FoundJob(name, job_dir, journal_path, has_memory, changed_ns, owner))
    return sorted(found, key=lambda job: (-job.changed_wall_ns, job.name))


def _journal_facts(path: Path, state_dir: Path) -> os.stat_result | None:
    """None where there is none to be read."""
    try:
        facts, above, shared = path.lstat(), path.parent.lstat(), state_dir.stat()
    except OSError:
        return None
    is_believed = facts.st_uid == above.st_uid and facts.st_uid in (os.geteuid(), shared.st_uid)
    is_file = stat.S_ISREG(facts.st_mode) and stat.S_ISDIR(above.st_mode)
    return facts if is_file and is_believed and os.access(path, os.R_OK) else None


def find_leftovers(arena_dir: Path) -> list[Leftover]:
    """The memory of every job of this user, also where its keeper died while removing it, by
    path."""
    return sorted(map(_leftover, _job_dirs(arena_dir)), key=lambda leftover: leftover.path)


def _leftover(path: Path) -> Leftover:
    ending = _ENDING.fullmatch(path.name)
    is_being_removed = ending is not None and _is_keeper(ending[2])
    living = [
        (rank, status.pid if status else 0)
        for rank, (alive, status) in read_pages(path).items()
        if alive
    ]
    return Leftover(
        job=ending[1] if ending else path.name,
        path=path,
        bytes=resident_bytes(path),
        held_bytes=sum(resident_bytes(path / below) for below in SHELVES.values()),
        keeper_alive=is_held(path / "keeper.lock") or is_being_removed,
        ranks_alive=tuple(living),
    )


def _job_dirs(arena_dir: Path) -> list[Path]:
    below = user_dir(arena_dir)
    if not is_own(below):
        return []
    return [path for name in MEMORY.names(below) if is_own(path := below / name)]


def _is_keeper(pid: str) -> bool:
    try:
        return KEEPER_MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
