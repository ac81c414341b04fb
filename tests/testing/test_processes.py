"""Processes: whether one lives, as the kernel says."""

from __future__ import annotations

import os
import subprocess
import sys

from keepstep.testing.processes import is_dead, process_state


def test_one_that_runs_one_that_has_ended_and_one_that_is_gone() -> None:
    assert not is_dead(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(child.pid) == "Z" and is_dead(child.pid)
    child.wait()
    assert process_state(child.pid) == "" and is_dead(child.pid)
