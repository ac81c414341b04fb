"""Slowness: the hand inside a rank that makes its steps slow, and stays.

Comes in: the plan's faults, and which step begins. Goes out: processor time spent for nothing in
every step from then on (`slow`), or a quota of processor time on a cgroup that the rank is moved
into (`cpu-quota`); and a note of it that outlives the rank. No number of the training changes.

Invariant: a life of the rank after the one that was made slow is as fast as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from pathlib import Path

from keepstep.edge.probes import cgroups
from keepstep.model.snapshot import Phase
from keepstep.testing.faults import CPU_QUOTA, SLOW, Fault
from keepstep.testing.injector import FaultPlan, attempted, note

PERIOD_US = 100_000
LEAST_QUOTA_US = 1000  # as the kernel has it


class Slowness:
    """A phase listener: `session.phase_listeners.append(Slowness(plan, rank, step_ms))`."""

    def __init__(self, plan: FaultPlan, rank: int, step_ms: float) -> None:
        self._plan = plan
        self._step_ms = step_ms
        done = attempted(plan.attempts)
        self._mine = {
            number: fault
            for number, fault in enumerate(plan.faults)
            if fault.is_slowness and fault.rank == rank and number not in done
        }
        self._burnt_s = 0.0  # a step

    def __call__(self, phase: Phase, step: int) -> None:
        if phase is not Phase.FORWARD:
            return
        for number, fault in list(self._mine.items()):
            if step >= fault.step:
                del self._mine[number]
                self._begin(number, fault, step)
        until_s = time.thread_time() + self._burnt_s
        while time.thread_time() < until_s:
            pass

    def _begin(self, number: int, fault: Fault, step: int) -> None:
        attempts = self._plan.attempts
        note(attempts, number, "about to", pid=os.getpid(), phase="forward", step=step)
        assert fault.factor is not None
        try:
            if fault.kind == SLOW:
                self._burnt_s += self._step_ms / 1e3 * max(0.0, fault.factor - 1)
                told = f"{1e3 * self._burnt_s:.1f} ms of processor time a step"
            else:
                assert fault.kind == CPU_QUOTA
                own = enter_quota(os.getpid(), fault.factor)
                atexit.register(leave_quota, os.getpid(), own)
                told = f"a quota in {own}"
        except (LookupError, OSError) as error:
            note(attempts, number, "cannot", why=f"{type(error).__name__}: {error}")
            return
        note(attempts, number, "did", slowness=told)


def enter_quota(pid: int, processors: float) -> Path:
    """Move a process into a cgroup of its own below the one it is in, with so many processors'
    time. Returns that cgroup's directory. Raises LookupError when no cgroup holds its processor
    time, OSError when it must not be changed."""
    stat = cgroups.find_file(pid, "cpu", in_v1="cpu.stat", in_v2="cpu.stat")
    if stat is None:
        raise LookupError("expected a cgroup with a processor quota, found none")
    quota_us = max(LEAST_QUOTA_US, int(processors * PERIOD_US))
    own = stat.parent / f"keepstep-drill-{pid}"
    own.mkdir(exist_ok=True)
    try:
        if (own / "cpu.cfs_quota_us").exists():  # v1
            (own / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (own / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (own / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        (own / "cgroup.procs").write_text(str(pid))
    except OSError:
        own.rmdir()
        raise
    return own


def leave_quota(pid: int, own: Path) -> None:
    """Back to where it was. A rank that is killed leaves an empty cgroup behind."""
    if pid == os.getpid():  # and not a child that was forked meanwhile
        with contextlib.suppress(OSError):
            (own.parent / "cgroup.procs").write_text(str(pid))
            own.rmdir()
