"""Orphans: processes of an agent that was killed, ended by the one that follows it.

They are found by a mark in their environment, which `/proc` shows as it was when the process was
started. Forks of a rank have its mark, and so has what a program starts before it protects
anything. What it starts later has none (`forget_rank_mark`): that may be a run of its own.

Invariant: another user's processes, those above this one, and those that see another `/dev/shm` are
never ended, whatever stands in their environment.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from keepstep.edge.os.process_stat import process_stat
from keepstep.model.launch import RANK_OF
from keepstep.model.units import MS_NS, S_NS

END_WITHIN_NS = 10 * S_NS
PROC = Path("/proc")


def forget_rank_mark(environ: MutableMapping[str, str]) -> None:
    """In a rank, for what it starts from now on."""
    environ.pop(RANK_OF, None)


def end_orphans(marks: Mapping[str, str], place: Path | None = None) -> list[int]:
    """SIGKILL to every process of this user that was started with these variables in its
    environment, and to what it has started meanwhile; those that were ended, once they are gone.
    place: a directory; only who finds the same one under that path is meant."""
    ended: list[int] = []
    deadline_ns = time.monotonic_ns() + END_WITHIN_NS
    while found := find_orphans(marks, place):
        for pid in found:
            if _end(pid):
                ended.append(pid)
        if time.monotonic_ns() > deadline_ns:
            break  # one that the kernel cannot end: its page's lock tells whoever needs it
    return sorted(set(ended))


def find_orphans(marks: Mapping[str, str], place: Path | None = None) -> list[int]:
    """The processes that `end_orphans` would end."""
    wanted = {f"{name}={value}".encode() for name, value in marks.items()}
    spared = _with_ancestors(os.getpid())
    return [
        pid
        for pid in _pids()
        if pid not in spared and _is_ours(pid) and wanted <= _environ(pid) and _sees(pid, place)
    ]


def _with_ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid:
        found.add(pid)
        stat = process_stat(pid)
        pid = 0 if stat is None else stat.parent
    return found


def _is_ours(pid: int) -> bool:
    """Root reads everybody's environment."""
    try:
        return (PROC / str(pid)).stat().st_uid == os.geteuid()
    except OSError:
        return False


def _sees(pid: int, place: Path | None) -> bool:
    """In another mount namespace the same path may be another directory: another job's."""
    if place is None:
        return True
    theirs = PROC / str(pid) / "root" / place.relative_to("/")
    try:
        return os.path.samestat(theirs.stat(), place.stat())
    except OSError:
        return False


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(PROC) if name.isdecimal()]


def _environ(pid: int) -> set[bytes]:
    """As it was started with; nothing of a process that is over, or another user's."""
    try:
        return set((PROC / str(pid) / "environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _end(pid: int) -> bool:
    """Whether it was there and is gone."""
    with suppress(ProcessLookupError, PermissionError):
        fd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            waiting = select.poll()
            waiting.register(fd, select.POLLIN)
            return bool(waiting.poll(END_WITHIN_NS // MS_NS))
        finally:
            os.close(fd)
    return False
