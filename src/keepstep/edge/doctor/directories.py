"""Directories: where a job writes, what kind of place that is, and whether anything can be written.

Comes in: a path and the mounts. Goes out: DirectoryFacts. What is written is one file without a
name, which is gone when it is closed; where the directory is missing nothing is written and nothing
made.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from keepstep.edge.doctor.host import Host
from keepstep.model.machine_facts import DirectoryFacts

# what the kernel shows as files
WITHOUT_FILES = {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "securityfs", "tracefs", "debugfs"}


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    at: str
    filesystem: str
    options: frozenset[str]


def read_mounts(host: Host) -> list[Mount]:
    """The mounts of this process."""
    mounts = []
    for line in (host.text("/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        here, there = before.split(), after.split()
        if len(here) >= 6 and len(there) >= 3:
            options = frozenset(here[5].split(",")) | frozenset(there[2].split(","))
            mounts.append(Mount(_plain(here[4]), there[0], options))
    return mounts


def read_directory(host: Host, path: str | Path, mounts: list[Mount]) -> DirectoryFacts:
    """Facts of an absolute path."""
    path = Path(path)
    nearest = path
    while not host.place(nearest).is_dir() and nearest != nearest.parent:
        if os.path.lexists(host.place(nearest)):
            break  # a file is in the way
        nearest = nearest.parent
    mount = _mount_of(os.path.realpath(host.place(nearest)), host, mounts)
    there = host.place(nearest)
    try:
        stat = there.stat()
        space = host.space(there)
    except OSError:
        stat, space = None, None
    return DirectoryFacts(
        path=str(path),
        nearest=str(nearest),
        refusal=_refusal(there, nearest == path, mount.filesystem if mount else None),
        filesystem=mount.filesystem if mount else None,
        options=mount.options if mount else frozenset(),
        total_bytes=space.total_bytes if space else None,
        free_bytes=space.free_bytes if space else None,
        free_files=space.free_files if space else None,
        owner=stat.st_uid if stat else None,
        mode=stat.st_mode & 0o7777 if stat else None,
    )


def _refusal(there: Path, probe: bool, filesystem: str | None) -> str:
    if not there.is_dir():
        return f"{there} is no directory"
    if filesystem in WITHOUT_FILES:
        return f"{there} is {filesystem}, in which nobody can make files"
    try:
        if probe:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(b"\0")
        elif not os.access(there, os.W_OK | os.X_OK):
            return f"it is not there, and nothing can be made in {there}"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _mount_of(real: str, host: Host, mounts: list[Mount]) -> Mount | None:
    """The mount that a path lies on: the longest that leads there, of equals the last."""
    below = os.path.relpath(real, os.path.realpath(host.root))
    inside = "/" if below == "." else f"/{below}"
    found = None
    for mount in mounts:
        is_above = mount.at == "/" or f"{inside}/".startswith(f"{mount.at}/")
        if is_above and (found is None or len(mount.at) >= len(found.at)):
            found = mount
    return found


def _plain(text: str) -> str:
    """A path as the kernel escapes it: blanks and backslashes in octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
