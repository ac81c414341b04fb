"""Computed: how long a process has had a core, all its threads together (proc(5), `stat`)."""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.model.units import S_NS

USER, SYSTEM = 11, 12  # behind the name, which may contain anything


def computed_ns(pid: int) -> int:
    """In the kernel's ticks, some 10 ms each; 0 when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    ticks = int(fields[USER]) + int(fields[SYSTEM])
    return ticks * S_NS // os.sysconf("SC_CLK_TCK")
