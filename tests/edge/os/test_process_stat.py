"""What the kernel tells of a process in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from keepstep.edge.os.process_stat import ProcessStat, process_stat, stat_in

LINE = "12 (a (name) R 9) S 4 12 12 0 -1 4194560 1 0 0 0 250 31 0 0 20 0 1 0 4711 1024\n"


def test_a_name_may_hold_anything() -> None:
    assert stat_in(LINE) == ProcessStat("S", 4, 250, 31, 4711)


@pytest.mark.parametrize("text", ["", "12 (name) S 4\n", LINE.replace("4711", "x")])
def test_what_is_no_such_line_is_nothing(text: str) -> None:
    assert stat_in(text) is None


def test_of_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    found = process_stat(os.getpid())
    assert found is not None and not found.has_ended
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ended = process_stat(child.pid)
    assert ended is not None and ended.has_ended and ended.parent == os.getpid()
    assert found.began <= ended.began
    child.wait()
    assert process_stat(child.pid) is None
