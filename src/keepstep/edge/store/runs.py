"""Runs: what a fresh start leaves behind in a store is kept beside what it writes, and never taken.

    <store>/step-...                       the first run
    <store>/run-000002/keepstep-run.json   that a second one has begun
    <store>/run-000002/step-...            its checkpoints

Comes in: a filesystem and the store's directory. Goes out: the directory of the newest run. A run
exists exactly when its file does, which appears by a rename.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from fsspec.spec import AbstractFileSystem

from keepstep.edge.store.checked_file import store_errors
from keepstep.edge.store.manifest import FORMAT_VERSION, seal

RUN = "keepstep-run.json"
FIRST = 1

_RUN_DIR = re.compile(r"run-(\d{6})")


def run_path(root: str, number: int) -> str:
    return root if number == FIRST else f"{root}/run-{number:06d}"


def runs_in(fs: AbstractFileSystem, root: str) -> Iterator[int]:
    """The numbers of all that have begun, newest first; the first is always among them. Looks no
    further than it is asked. Raises StoreError."""
    with store_errors(f"listing {root}"):
        fs.invalidate_cache()  # another process may have begun one
        names: list[str] = []
        with suppress(FileNotFoundError):
            names = [path.rstrip("/").rsplit("/", 1)[-1] for path in fs.ls(root, detail=False)]
    for number in sorted((int(m[1]) for m in map(_RUN_DIR.fullmatch, names) if m), reverse=True):
        begun = f"{run_path(root, number)}/{RUN}"
        with store_errors(f"looking for {begun}"):
            is_there = _is_there(fs, begun)
        if is_there:
            yield number
    yield FIRST


def newest_run(fs: AbstractFileSystem, root: str) -> int:
    """Its number. Raises StoreError."""
    return next(runs_in(fs, root))


def begin_run(fs: AbstractFileSystem, root: str, number: int) -> str:
    """From now on that run is the newest. The directory that is to be on the disk. Raises
    StoreError."""
    path = run_path(root, number)
    with store_errors(f"beginning {path}"):
        fs.makedirs(path, exist_ok=True)
        with fs.open(f"{path}/{RUN}.tmp", "wb") as file:
            file.write(seal({"format": FORMAT_VERSION, "run": number}))
        fs.mv(f"{path}/{RUN}.tmp", f"{path}/{RUN}")
    return path


def _is_there(fs: AbstractFileSystem, path: str) -> bool:
    try:
        fs.info(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
