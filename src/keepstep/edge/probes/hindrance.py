"""Hindrance: for how long the kernel has kept processes from what they were ready to do, where a
process lives: for want of its cgroup's quota of processor time, and for want of memory.

The first is summed over its cgroup and those above it that can be seen: a quota may be set on any
of them, and each counts its own. A process that moves to another cgroup goes on from the sum that
it had.

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
    throttled = _Throttled(pid)
    # v1 has no pressure of a cgroup
    pressure = cgroups.find_file(pid, "memory", in_v1="memory.pressure", in_v2="memory.pressure")
    return lambda: Hindrance(throttled.read_ns(), read_stall_ns(pressure or MACHINE_PRESSURE))


class _Throttled:
    """Of one process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._where = ""  # its cgroups, as the kernel names them
        self._files: list[Path] = []
        self._offset_ns = 0  # of what was counted where it was before
        self._last_ns: int | None = None

    def read_ns(self) -> int | None:
        """None where no quota is counted, or no more."""
        where = cgroups.named_by(self._pid)
        has_moved = where not in ("", self._where)
        if has_moved:
            self._where = where
            stat = cgroups.find_file(self._pid, "cpu", in_v1="cpu.stat", in_v2="cpu.stat")
            self._files = [] if stat is None else cgroups.and_above(stat)
        counted = [ns for file in self._files if (ns := read_throttled_ns(file)) is not None]
        if not counted:
            return None
        if has_moved and self._last_ns is not None:
            self._offset_ns = self._last_ns - sum(counted)
        self._last_ns = sum(counted) + self._offset_ns
        return self._last_ns


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
