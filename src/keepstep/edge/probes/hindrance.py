"""Hindrance: for how long the kernel has kept processes from what they were ready to do, where a
process lives: for want of its cgroup's quota of processor time, and for want of memory.

The second is pressure stall information (PSI) of its cgroup, or of the machine where cgroups have
none: the time in which some process waited for memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from keepstep.edge.probes import cgroups
from keepstep.model.step_work import Hindrance

MACHINE_PRESSURE = Path("/proc/pressure/memory")
US_NS = 1000


def find_hindrance(pid: int) -> Callable[[], Hindrance]:
    """What is counted there, whenever that is asked."""
    quota = cgroups.find_file(pid, "cpu", in_v1="cpu.stat", in_v2="cpu.stat")
    # v1 has no pressure of a cgroup
    pressure = cgroups.find_file(pid, "memory", in_v1="memory.pressure", in_v2="memory.pressure")
    return lambda: Hindrance(read_throttled_ns(quota), read_stall_ns(pressure or MACHINE_PRESSURE))


def read_throttled_ns(path: Path | None) -> int | None:
    """Of `cpu.stat`: microseconds in v2, nanoseconds in v1. None where no quota is counted."""
    if path is None:
        return None
    in_us = cgroups.read_field(path, "throttled_usec")
    return cgroups.read_field(path, "throttled_time") if in_us is None else in_us * US_NS


def read_stall_ns(path: Path) -> int | None:
    """Of a pressure file, the time in which some process waited."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        kind, _, rest = line.partition(" ")
        total = rest.rpartition("total=")[2]
        if kind == "some" and total.isdecimal():
            return int(total) * US_NS
    return None
