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
IMPATIENT_NICE = 5  # about an eighth of a core beside two that are always wanted
PATIENCE_S = 5.0


def give_way(nice: int) -> None:
    """Let other processes compute first, by a nice value of 1 to 19; never above what this process
    had."""
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    _nice_session(max(nice, _session_nice()))


def give_way_in_thread(nice: int) -> None:
    """The same for the calling thread alone (Linux gives each thread its own nice value), on top of
    what the process has."""
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(IDLE_NICE, now + nice))


@contextlib.contextmanager
def in_idle_time(patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Compute only when nobody else wants to; after `patience_s` a little beside the others, or
    where every core is always wanted it would never be done. Without privilege a process could not
    take its place among the others again afterwards: there it computes beside them from the start.
    """
    if os.geteuid() != 0:
        yield
        return
    thread, nice_before = threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0)
    session_before = _session_nice()
    change = threading.Lock()
    is_over = False

    def lose_patience() -> None:
        with change:
            if not is_over:
                _compute_beside(thread, max(nice_before, IMPATIENT_NICE))
                _nice_session(max(session_before, IMPATIENT_NICE))

    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _nice_session(IDLE_NICE)
    timer = threading.Timer(patience_s, lose_patience)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with change:
            is_over = True
            _compute_beside(thread, nice_before)
            _nice_session(session_before)


def _compute_beside(thread: int, nice: int) -> None:
    """Again as others do, with that nice value, in that thread of this process."""
    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, thread, nice)


def _session_nice() -> int:
    """That of the session which this process is in; 0 where the kernel knows of none."""
    try:
        return int(AUTOGROUP.read_text().split()[-1])  # "/autogroup-17 nice 0"
    except (OSError, ValueError, IndexError):
        return 0


def _nice_session(nice: int) -> None:
    """Of the session that this process leads; another's is not ours to change."""
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # this kernel does not schedule by session
            AUTOGROUP.write_text(str(nice))
