"""Cgroups: where the files of a process's control group are, v2 or v1, and what they count.

Find them while the process lives: a dead one has none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

PROC = Path("/proc")
MOUNTS = Path("/proc/self/mounts")


def named_by(pid: int) -> str:
    """The process's cgroups, as the kernel names them; empty: it is gone."""
    try:
        return (PROC / str(pid) / "cgroup").read_text(encoding="utf-8")
    except OSError:
        return ""


def and_above(file: Path) -> list[Path]:
    """A file of a cgroup, and the same one of each cgroup above it that can be seen."""
    found = [file]
    for directory in file.parent.parents:
        if not (directory / file.name).is_file():
            break
        found.append(directory / file.name)
    return found


def find_file(
    pid: int,
    controller: str,
    *,
    in_v1: str,
    in_v2: str,
    is_readable: Callable[[Path], bool] = Path.is_file,
) -> Path | None:
    """A file of the cgroup by which that controller holds the process, by its name in v1 and in v2;
    None when there is none that can be read."""
    try:
        lines = named_by(pid).splitlines()
        mounts = [line.split() for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    v1 = next((path for names, path in paths.items() if controller in names.split(",")), None)
    kind, file, inside = (
        ("cgroup", in_v1, v1) if v1 is not None else ("cgroup2", in_v2, paths.get(""))
    )
    for mount in mounts:
        if (
            inside is not None
            and mount[2] == kind
            and (kind == "cgroup2" or controller in mount[3].split(","))
        ):
            # In a container the cgroup's own root is what is mounted, whatever path the process
            # names.
            for directory in (Path(mount[1]) / inside.lstrip("/"), Path(mount[1])):
                if is_readable(directory / file):
                    return directory / file
    return None


def read_field(path: Path, name: str) -> int | None:
    """A number of a file of names and numbers, one a line; None when it is not there."""
    try:
        found = dict(
            line.split(None, 1)
            for line in path.read_text(encoding="ascii").splitlines()
            if " " in line
        )
        return int(found[name])
    except (OSError, KeyError, ValueError):
        return None
