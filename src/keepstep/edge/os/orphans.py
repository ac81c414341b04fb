"""Orphans: processes of an agent that was killed, ended by the one that follows it."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from keepstep.model.units import MS_NS, S_NS

END_WITHIN_NS = 10 * S_NS


def end_orphans(agent_pid: int, pids: Sequence[int]) -> list[int]:
    """SIGKILL to these processes and their groups, as far as that agent had started them; those
    that were ended, once they are gone. A number that is another process's by now is left alone."""
    ended = []
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError, FileNotFoundError):
            fd = os.pidfd_open(pid)
            try:
                if _is_of(agent_pid, pid):
                    os.killpg(pid, signal.SIGKILL)
                    _wait(fd)
                    ended.append(pid)
            finally:
                os.close(fd)
    return ended


def _is_of(agent_pid: int, pid: int) -> bool:
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    return f"KEEPSTEP_AGENT={agent_pid}".encode() in environ.split(b"\0")


def _wait(pidfd: int) -> None:
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    waiting.poll(END_WITHIN_NS // MS_NS)
