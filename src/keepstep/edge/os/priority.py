"""Priority: who computes first when cores are short: the trainer, and then what keepstep does for
it.

A nice value orders the threads of one session only where the kernel schedules by session
(`sched_autogroup`, on by default on most distributions): there each session gets the same share,
whatever its threads are. So who leads a session gives it a nice value, too (sched(7)).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
IDLE_NICE = 19


def give_way(nice: int) -> None:
    """Let other processes compute first, by a nice value of 1 to 19; never above what this process
    had."""
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    _nice_session(nice)


def give_way_in_thread(nice: int) -> None:
    """The same for the calling thread alone (Linux gives each thread its own nice value), on top of
    what the process has."""
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(IDLE_NICE, now + nice))


@contextlib.contextmanager
def in_idle_time() -> Iterator[None]:
    """Compute only when nobody else wants to. Only where this process may take its place among the
    others again afterwards, which takes privilege."""
    may_return = os.geteuid() == 0
    if may_return:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        _nice_session(IDLE_NICE)
    try:
        yield
    finally:
        if may_return:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            _nice_session(0)


def _nice_session(nice: int) -> None:
    """Of the session that this process leads; another's is not ours to change."""
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # this kernel does not schedule by session
            AUTOGROUP.write_text(str(nice))
