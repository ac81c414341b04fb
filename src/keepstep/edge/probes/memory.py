"""Memory: how many processes the kernel has killed for want of it, in a process's cgroup and on the
machine.

A bare "Killed" proves nothing: anybody may send SIGKILL. The kernel counts those it sent itself;
whoever remembers the count from before a death can tell. Find the cgroup while the process lives: a
dead one has none.
"""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
MOUNTS = Path("/proc/self/mounts")
VMSTAT = Path("/proc/vmstat")


def find_counter(pid: int) -> Path | None:
    """The file that counts for the process's memory cgroup, v2 or v1; None when there is none to
    read."""
    try:
        lines = (PROC / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = [line.split() for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    v1 = next((path for names, path in paths.items() if "memory" in names.split(",")), None)
    kind, file, inside = (
        ("cgroup", "memory.oom_control", v1)
        if v1 is not None
        else ("cgroup2", "memory.events", paths.get(""))
    )
    for mount in mounts:
        if (
            inside is not None
            and mount[2] == kind
            and (kind == "cgroup2" or "memory" in mount[3].split(","))
        ):
            # In a container the cgroup's own root is what is mounted, whatever path the process
            # names.
            for directory in (Path(mount[1]) / inside.lstrip("/"), Path(mount[1])):
                if read_counter(directory / file) is not None:
                    return directory / file
    return None


def read_counter(path: Path | None) -> int | None:
    """How many were killed there since the cgroup was made; None when nobody counts."""
    return None if path is None else _field(path, "oom_kill")


def machine_oom_kills() -> int | None:
    """How many were killed on this machine since it started."""
    return _field(VMSTAT, "oom_kill")


def _field(path: Path, name: str) -> int | None:
    try:
        found = dict(
            line.split(None, 1)
            for line in path.read_text(encoding="ascii").splitlines()
            if " " in line
        )
        return int(found[name])
    except (OSError, KeyError, ValueError):
        return None
