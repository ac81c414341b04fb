"""Runs: what a fresh start leaves behind in a store is kept beside what it writes, and never taken.

    <store>/step-...                       the first run
    <store>/run-000002/keepstep-run.json   that a second one has begun
    <store>/run-000002/step-...            its checkpoints

Comes in: a filesystem and the store's directory. Goes out: the directory of the newest run. A run
exists exactly when its file does, which appears whole. Where the job has a secret that file
is signed: whoever else could begin a run could have the job start afresh over its checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from fsspec.spec import AbstractFileSystem

from keepstep.edge.store.checked_file import is_there, put_whole, read_whole, store_errors
from keepstep.edge.store.manifest import FORMAT_VERSION, seal, unseal
from keepstep.edge.store.signer import Signer, sign_of
from keepstep.errors import DamageError

RUN = "keepstep-run.json"
FIRST = 1

_RUN_DIR = re.compile(r"run-(\d{6})", re.ASCII)


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
            has_begun = is_there(fs, begun)
        if has_begun:
            yield number
    yield FIRST


def newest_run(fs: AbstractFileSystem, root: str, signer: Signer | None = None) -> int:
    """Its number. `signer`: who must have begun it. Raises StoreError, and DamageError when another
    one has."""
    number = next(runs_in(fs, root))
    if signer is not None and number != FIRST:
        _check_run(fs, root, number, signer)
    return number


def _check_run(fs: AbstractFileSystem, root: str, number: int, signer: Signer) -> None:
    where = f"{run_path(root, number)}/{RUN}"
    with store_errors(f"reading {where}"):
        raw = read_whole(fs, where, where)
    found = unseal(raw or b"", where, sign_of(signer, "run")).get("run")
    if found != number:
        raise DamageError(f"{where}: expected the record of run {number}, found that of {found}")


def sign_run(fs: AbstractFileSystem, root: str, signer: Signer) -> None:
    """The newest one is this job's, whoever began it. Raises StoreError."""
    try:
        newest_run(fs, root, signer)
    except DamageError:
        begin_run(fs, root, newest_run(fs, root), signer)


def begin_run(fs: AbstractFileSystem, root: str, number: int, signer: Signer | None = None) -> str:
    """From now on that run is the newest. The directory that is to be on the disk. Raises
    StoreError."""
    path = run_path(root, number)
    with store_errors(f"beginning {path}"):
        fs.makedirs(path, exist_ok=True)
        said = seal({"format": FORMAT_VERSION, "run": number}, sign=sign_of(signer, "run"))
        put_whole(fs, f"{path}/{RUN}", said, replaces=True)
    return path
