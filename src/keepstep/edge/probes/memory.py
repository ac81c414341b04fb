"""Memory: how many processes the kernel has killed for want of it, in a process's cgroup and on the
machine.

A bare "Killed" proves nothing: anybody may send SIGKILL. The kernel counts those it sent itself;
whoever remembers the count from before a death can tell. Find the cgroup while the process lives: a
dead one has none.
"""

from __future__ import annotations

from pathlib import Path

from keepstep.edge.probes import cgroups

VMSTAT = Path("/proc/vmstat")


def find_counter(pid: int) -> Path | None:
    """The file that counts for the process's memory cgroup, v2 or v1; None when there is none to
    read."""
    return cgroups.find_file(
        pid,
        "memory",
        in_v1="memory.oom_control",
        in_v2="memory.events",
        is_readable=lambda path: read_counter(path) is not None,
    )


def read_counter(path: Path | None) -> int | None:
    """How many were killed there since the cgroup was made; None when nobody counts."""
    return None if path is None else cgroups.read_field(path, "oom_kill")


def machine_oom_kills() -> int | None:
    """How many were killed on this machine since it started."""
    return cgroups.read_field(VMSTAT, "oom_kill")
