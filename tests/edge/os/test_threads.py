"""What is left of threads when their loop has no use for them; the rest is
`tests/contracts/test_executor.py`."""

from __future__ import annotations

import subprocess
import sys
import threading

from keepstep.edge.os.loop import Loop
from keepstep.edge.os.threads import Threads


def test_closing_waits_for_what_has_begun_and_nobody_hears_of_it() -> None:
    loop = Loop()
    threads = Threads(1, loop.post)
    begun, may_end = threading.Event(), threading.Event()
    done: list[str] = []
    heard: list[str] = []

    def work() -> str:
        begun.set()
        may_end.wait()
        done.append("work")
        return "work"

    threads.submit(work, heard.append)
    begun.wait()
    closing = threading.Thread(target=threads.close)
    closing.start()
    may_end.set()
    closing.join()
    assert done == ["work"]
    loop.post(lambda: heard.append("nothing came"))
    loop.run(lambda: bool(heard))
    assert heard == ["nothing came"]
    loop.close()


HANGING = """
import threading
from keepstep.edge.os.threads import AsideThreads

begun = threading.Event()
AsideThreads(lambda call: call(), begun.set).submit(threading.Event().wait, print)
assert begun.wait(60)
"""


def test_a_process_ends_over_work_aside_that_never_does() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGING], timeout=60, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
