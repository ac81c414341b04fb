"""Priority: who computes first when cores are short: the trainer, and then what keepstep does for
it.

A nice value orders the threads of one session only where the kernel schedules by session
(`sched_autogroup`, on by default on most distributions): there each session gets the same share,
whatever its threads are. So who leads a session gives it a nice value, too (sched(7)).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
FIRST_NICE, IDLE_NICE = -20, 19  # the least there is, and the most
IMPATIENT_NICE = 5  # about an eighth of a core beside two that are always wanted
PATIENCE_S = 5.0
CHANGE_PAUSE_S = 0.11  # the kernel takes a change in 0.1 s, of all that have no privilege
TRIES = 5  # each start of a persister changes a session, too
BACK_TRIES = 20  # who trains at the end of the queue would hold up a job: rather wait two seconds

log = logging.getLogger("keepstep")


def give_way(nice: int) -> None:
    """Let other processes compute first, by a nice value of 1 to 19; never above what this process
    had."""
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    _nice_session_if_let(max(nice, _session_nice()))


def give_way_in_thread(nice: int) -> None:
    """The same for the calling thread alone (Linux gives each thread its own nice value), on top of
    what the process has."""
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(IDLE_NICE, now + nice))


def place_child(pid: int, nice: int, least: int) -> None:
    """Give a child, which leads a session, another place among what computes: by the nice value of
    that session, and of its threads where this process may take that back to `least`, the most
    urgent that the child will ever be. Where it may not, and the kernel does not schedule by
    session, the child keeps the place that it was born with.

    Raises BlockingIOError when the kernel has just let somebody change a session: again later.
    """
    if _may_come_back_to(least):
        for _ in range(2):  # a thread may begin meanwhile, with the nice value of who began it
            for thread in _threads_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(max(nice, 0)))
    except BlockingIOError:
        raise
    except OSError:  # it is gone, or this kernel does not schedule by session, or lets nobody
        return


def _threads_of(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


@functools.cache
def _may_come_back_to(nice: int) -> bool:
    """Whether this process may lower a nice value to that: tried on a thread that ends, because to
    be root or to have a capability does not tell (a container's root may not)."""
    found: list[bool] = []

    def attempt() -> None:
        thread = threading.get_native_id()
        now = os.getpriority(os.PRIO_PROCESS, thread)
        try:
            os.setpriority(os.PRIO_PROCESS, thread, max(now, min(nice + 1, IDLE_NICE)))
            os.setpriority(os.PRIO_PROCESS, thread, nice)
            found.append(now < IDLE_NICE)
        except PermissionError:
            found.append(False)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return found == [True]


@contextlib.contextmanager
def in_idle_time(patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Compute only when nobody else wants to; after `patience_s` a little beside the others, or
    where every core is always wanted it would never be done. Without privilege a process could not
    take its own place among the others again afterwards, but its session's it can: whoever leads
    none computes beside the others from the start.

    Raises BlockingIOError when the session cannot take its place again.
    """
    is_privileged = os.geteuid() == 0
    if not (is_privileged or _leads_session()):
        yield
        return
    thread, nice_before = threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0)
    session_before = _session_nice()
    change = threading.Lock()
    is_over = False

    def take_place(least: int) -> None:
        if is_privileged:
            _compute_beside(thread, max(nice_before, least))
        _nice_session(max(session_before, least), BACK_TRIES)

    def lose_patience() -> None:
        with change:
            if not is_over:
                take_place(IMPATIENT_NICE)

    if is_privileged:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _nice_session_if_let(IDLE_NICE)
    timer = threading.Timer(patience_s, lose_patience)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with change:
            is_over = True
            take_place(FIRST_NICE)


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


def _leads_session() -> bool:
    """Another's session is not ours to change."""
    return os.getsid(0) == os.getpid()


def _nice_session_if_let(nice: int) -> None:
    """The session stays where it is when others change theirs again and again."""
    try:
        _nice_session(nice)
    except BlockingIOError as error:
        log.warning("session of process %d keeps its priority: %s", os.getpid(), error)


def _nice_session(nice: int, tries: int = TRIES) -> None:
    """Of the session that this process leads. Raises BlockingIOError when others change theirs
    again and again."""
    if not _leads_session() or _session_nice() == nice:
        return
    for left in reversed(range(tries)):
        try:
            AUTOGROUP.write_text(str(nice))
            return
        except BlockingIOError:
            if not left:
                raise
            time.sleep(CHANGE_PAUSE_S)
        except OSError:  # this kernel does not schedule by session, or lets nobody here do it
            return
