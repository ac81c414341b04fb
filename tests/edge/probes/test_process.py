"""Looks at real processes: what the kernel says about one that runs, sleeps, is stopped, or is
gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from keepstep.edge.probes.process import describe, group_of, read_group, read_process
from keepstep.testing.cluster import wait_for

SPIN = "print(flush=True)\nwhile True: pass"
SLEEP = (
    "import threading\nlock = threading.Lock()\nlock.acquire()\nprint(flush=True)\nlock.acquire()"
)


@contextmanager
def child(code: str) -> Iterator[int]:
    """A process in a group of its own that has begun to do what `code` says."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def soon(what: Callable[[], bool], pid: int) -> None:
    wait_for(what, lambda: describe(pid), 30)


def test_one_that_runs_uses_the_processor() -> None:
    with child(SPIN) as pid:
        before = read_process(pid).cpu_ns
        soon(lambda: read_process(pid).state == "running", pid)
        soon(lambda: read_process(pid).cpu_ns > before + 10**8, pid)
        assert read_process(pid).wchan == ""


def test_one_that_waits_for_a_lock_sleeps() -> None:
    with child(SLEEP) as pid:
        soon(lambda: read_process(pid).state == "asleep", pid)
        assert read_process(pid).threads == 1
        assert "futex" in read_process(pid).wchan or read_process(pid).wchan == "", (
            "empty where it is not ours to see"
        )


def test_one_that_is_stopped_and_goes_on() -> None:
    with child(SPIN) as pid:
        os.kill(pid, signal.SIGSTOP)
        soon(lambda: read_process(pid).state == "stopped", pid)
        os.kill(pid, signal.SIGCONT)
        soon(lambda: read_process(pid).state == "running", pid)


def test_a_dead_one_is_gone_reaped_or_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_process(process.pid).state == "gone"
    process.wait()
    assert read_process(process.pid).state == "gone" and group_of(process.pid) is None
    assert describe(process.pid) == f"process {process.pid} is gone\n"


def test_a_group_counts_its_children() -> None:
    spawn = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {SPIN!r}])\n{SLEEP}"
    with child(spawn) as pid:
        own = read_process(pid).cpu_ns
        soon(lambda: read_group(pid).cpu_ns > own + 10**9, pid)
        assert read_process(pid).cpu_ns < own + 10**9 and group_of(pid) == pid
        assert read_group(pid).io_bytes > 0


def test_a_description_names_every_thread() -> None:
    with child(
        f"import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n{SLEEP}"
    ) as pid:
        soon(lambda: "2 threads" in describe(pid), pid)
        assert (
            len(
                [
                    line
                    for line in describe(pid).splitlines()
                    if line.rstrip().endswith(("python", "python3", "python3.11"))
                ]
            )
            >= 1
        )


def test_a_name_may_hold_a_parenthesis() -> None:
    with child("import ctypes\nctypes.CDLL(None).prctl(15, b'a) R (b', 0, 0, 0)\n" + SLEEP) as pid:
        soon(lambda: read_process(pid).state == "asleep" and group_of(pid) == pid, pid)


def test_a_look_is_cheap() -> None:
    began = time.thread_time()
    for _ in range(200):
        read_process(os.getpid())
    assert time.thread_time() - began < 1.0, (
        "200 looks, of which a node with 8 ranks takes 16 a second"
    )
