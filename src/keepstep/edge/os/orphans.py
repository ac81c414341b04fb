"""Orphans: processes of an agent that was killed, ended by the one that follows it."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from keepstep.model.units import MS_NS, S_NS

END_WITHIN_NS = 10 * S_NS
PROC = Path("/proc")


def end_orphans(marks: Mapping[str, str]) -> list[int]:
    """SIGKILL to every process of this user that was started with these variables in its
    environment, and to what it has started meanwhile; those that were ended, once they are gone."""
    ended: list[int] = []
    deadline_ns = time.monotonic_ns() + END_WITHIN_NS
    while found := _marked(marks):
        for pid in found:
            if _end(pid):
                ended.append(pid)
        if time.monotonic_ns() > deadline_ns:
            break  # one that the kernel cannot end: its page's lock tells whoever needs it
    return sorted(set(ended))


def _marked(marks: Mapping[str, str]) -> list[int]:
    wanted = {f"{name}={value}".encode() for name, value in marks.items()}
    return [pid for pid in _pids() if pid != os.getpid() and wanted <= _environ(pid)]


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
