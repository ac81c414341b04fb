"""Computed: how long a process has had a core, all its threads together (proc(5), `stat`)."""

from __future__ import annotations

import os

from keepstep.edge.os.process_stat import process_stat
from keepstep.model.units import S_NS


def computed_ns(pid: int) -> int:
    """In the kernel's ticks, some 10 ms each; 0 when there is no such process."""
    stat = process_stat(pid)
    ticks = 0 if stat is None else stat.user_ticks + stat.system_ticks
    return ticks * S_NS // os.sysconf("SC_CLK_TCK")
