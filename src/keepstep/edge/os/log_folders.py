"""Log files below a directory: found, and what is there beside them told.

Comes in: a path. Goes out: the regular files, sorted, and by name why others were left out. No link
is followed, nothing that is no regular file is opened, and nothing of the kernel's own file systems
(`/proc`, `/sys`): a file there may have no end, or answer when it likes.

Invariant: bounded by `MAX_ENTRIES` and `MAX_DEPTH`, whatever lies there; nothing raises.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

MAX_FILES = 20_000
MAX_ENTRIES = 500_000
MAX_DEPTH = 64
NO_LOGS = {".pt", ".pth", ".bin", ".npy", ".npz", ".safetensors", ".distcp", ".so", ".zip", ".tar"}
KERNELS = {
    *("proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "configfs"),
    *("bpf", "devpts", "mqueue", "hugetlbfs", "fusectl", "efivarfs", "binfmt_misc", "nsfs"),
}
KINDS = (
    (stat.S_ISLNK, "a link, and none is followed"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
OF_THE_KERNEL = "of the kernel's own file system"


@dataclass(slots=True)
class LogFolder:
    """`files` by name; `skipped`: why, by name. `is_cut`: there was more than is looked through."""

    files: dict[str, Path] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False


def find_logs(path: Path) -> LogFolder:
    """This file, or those below."""
    kernels = _kernel_devices()
    if not path.is_dir():
        return _alone(path, kernels)
    found = LogFolder()
    waiting, entries = [(path, 0)], 0
    while waiting:
        folder, depth = waiting.pop()
        name = folder.relative_to(path).as_posix()
        try:
            if folder.stat().st_dev in kernels:
                found.skipped[name] = OF_THE_KERNEL
                continue
            listed = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            found.skipped[name] = error.strerror or str(error)
            continue
        entries += len(listed)
        folders = []
        for entry in listed:
            if _is_folder(entry):
                folders.append(entry)
            else:
                _take(found, Path(entry.path), path)
        if folders and depth >= MAX_DEPTH:
            found.skipped[name] = f"folders deeper than {MAX_DEPTH}"
        elif depth < MAX_DEPTH:
            waiting += [(Path(entry.path), depth + 1) for entry in reversed(folders)]
        if len(found.files) >= MAX_FILES or entries >= MAX_ENTRIES:
            found.is_cut = bool(waiting) or len(found.files) > MAX_FILES
            break
    found.files = dict(sorted(found.files.items())[:MAX_FILES])
    return found


def _alone(path: Path, kernels: set[int]) -> LogFolder:
    try:
        if path.stat().st_dev in kernels:
            return LogFolder(skipped={path.name: OF_THE_KERNEL})
    except OSError:
        pass  # it is told when it is opened
    return LogFolder(files={path.name: path})


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _take(found: LogFolder, file: Path, root: Path) -> None:
    if file.suffix in NO_LOGS:
        return
    name = file.relative_to(root).as_posix()
    try:
        mode = file.lstat().st_mode
    except OSError as error:
        found.skipped[name] = error.strerror or str(error)
        return
    if stat.S_ISREG(mode):
        found.files[name] = file
        return
    found.skipped[name] = next((why for is_kind, why in KINDS if is_kind(mode)), "no regular file")


def _kernel_devices() -> set[int]:
    """The numbers of the devices that the kernel's own file systems are mounted as here."""
    found = set()
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields, _, after = line.partition(" - ")
                if after.split(" ", 1)[0] in KERNELS:
                    major, _, minor = fields.split(" ")[2].partition(":")
                    found.add(os.makedev(int(major), int(minor)))
    except (OSError, ValueError, IndexError):
        return found
    return found
