"""What one thread has used of a processor, asked by another one."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from keepstep.edge.os.thread_times import ThreadTimes


def test_another_thread_asks() -> None:
    times = ThreadTimes()
    before_ns, found = times.cpu_ns(), []
    while time.thread_time_ns() - before_ns < 30_000_000:
        pass
    asker = threading.Thread(target=lambda: found.append(times.cpu_ns()))
    asker.start()
    asker.join()
    assert found[0] - before_ns >= 30_000_000
    assert found[0] <= time.thread_time_ns()
    delay_ns = times.delay_ns()
    assert 0 <= delay_ns <= times.delay_ns()
    times.close()
    times.close()
    assert times.delay_ns() == 0


def test_where_the_kernel_does_not_count_it_is_nothing(tmp_path: Path) -> None:
    assert ThreadTimes(tmp_path).delay_ns() == 0
    task = tmp_path / str(threading.get_native_id())
    task.mkdir()
    (task / "schedstat").write_text("\n")
    assert ThreadTimes(tmp_path).delay_ns() == 0
    (task / "schedstat").write_text("11 22 3\n")
    times = ThreadTimes(tmp_path)
    assert times.delay_ns() == 22
    times.close()


def test_nobody_else_runs_meanwhile() -> None:
    """A thread that waits for Python's lock would have it for that long, once it is let go."""
    rounds, is_over = [0], threading.Event()
    times, interval_s = ThreadTimes(), sys.getswitchinterval()

    def count() -> None:
        while not is_over.is_set():
            rounds[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        while not rounds[0]:
            is_over.wait(0.001)
        sys.setswitchinterval(5)
        before = rounds[0]
        for _ in range(20):
            times.cpu_ns(), times.delay_ns()
        assert rounds[0] == before
    finally:
        sys.setswitchinterval(interval_s)
        is_over.set()
        counter.join()
        times.close()
