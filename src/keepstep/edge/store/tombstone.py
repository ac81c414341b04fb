"""Tombstone: what stands in a manifest's place once an attempt may never be published.

    {"xxh3_64": "...", "hmac_sha256": "...", "format": 1, "removed": "step-000000001000-000002-17"}

Who publishes an attempt and who removes it put a file under one name, each in place of none: a link
on a disk, a conditional put (`If-None-Match: *`) on an object store. One of them wins. A publisher
that loses has published nothing, however late it wakes; a remover that loses removes nothing.

On a disk all goes in the end, the tombstone last. A publisher links a file of its own, which it has
written before it looked at all others, and which goes after them: so it finds the tombstone, no
such file, or that others are missing. On an object store a put needs nothing but the name, and
whoever was stopped may put for ever: there the tombstone stays.

Comes in: a filesystem, an attempt's directory, a signer. Goes out: what says that it is removed,
and that its files are. Never removes a file of what was published.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from keepstep.edge.store.checked_file import is_what_is_there, own_directory, put_whole
from keepstep.edge.store.draft import MANIFEST, UNPUBLISHED
from keepstep.edge.store.manifest import FORMAT_VERSION, seal, unseal
from keepstep.edge.store.signer import Signer, sign_of
from keepstep.errors import DamageError, StoreError
from keepstep.model.checkpoint import CheckpointName

MOST_BYTES = 512  # of a tombstone: what is longer is not read for one
_FULL = (errno.ENOSPC, errno.EDQUOT)


def tombstone(name: CheckpointName, signer: Signer | None) -> bytes:
    """What stands there. The same for each who removes it."""
    body = {"format": FORMAT_VERSION, "removed": name.directory}
    return seal(body, sign=sign_of(signer, "tombstone"))


def is_tombstone(raw: bytes, name: CheckpointName, signer: Signer | None) -> bool:
    """Whether what stands in this attempt's place is one, of ours where we sign."""
    if len(raw) > MOST_BYTES:
        return False
    try:
        body = unseal(raw, MANIFEST, sign_of(signer, "tombstone"))
    except (DamageError, StoreError):
        return False
    return body.get("removed") == name.directory


def remove_unpublished(fs: AbstractFileSystem, directory: str, raw: bytes) -> None:
    """All files of an attempt that was not published, and now never is. `raw`: its tombstone. What
    was published stays; nothing there is fine. Raises OSError."""
    if isinstance(fs, LocalFileSystem):
        with suppress(FileNotFoundError):  # or another one removes it, too
            _remove_on_disk(fs, directory, raw)
    elif _is_claimed(fs, directory, raw):
        _remove_objects(fs, directory)


def _is_claimed(fs: AbstractFileSystem, directory: str, raw: bytes) -> bool:
    """False where it is published."""
    path = f"{directory}/{MANIFEST}"
    try:
        put_whole(fs, path, raw)
    except FileExistsError:
        return False
    except OSError as error:
        if not (isinstance(fs, LocalFileSystem) and error.errno in _FULL):
            raise
        return _is_claimed_without_room(path)
    # where neither links nor conditions are to be had, both may have been put
    return is_what_is_there(fs, path, raw)


def _is_claimed_without_room(path: str) -> bool:
    """By an empty file, which a disk has room for: else what fills it could never go."""
    try:
        with open(path, "xb"):
            return True
    except FileExistsError:
        return False


def _remove_on_disk(fs: LocalFileSystem, directory: str, raw: bytes) -> None:
    with own_directory(directory) as fd:
        here = f"/proc/self/fd/{fd}"  # whatever may be put in its place meanwhile
        if not _is_claimed(fs, here, raw):
            return
        os.fsync(fd)
        last = (UNPUBLISHED, MANIFEST)
        for file in os.listdir(fd):
            path = f"{here}/{file}"
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif file not in last:
                _unlink(file, fd)
        for file in last:
            _unlink(file, fd)
    os.rmdir(directory)


def _unlink(file: str, directory: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(file, dir_fd=directory)


def _remove_objects(fs: AbstractFileSystem, directory: str) -> None:
    fs.invalidate_cache()  # others have written there
    for entry in fs.ls(directory, detail=True):
        path = entry["name"].rstrip("/")
        if path.rsplit("/", 1)[-1] == MANIFEST:
            continue
        with suppress(FileNotFoundError):
            if entry["type"] == "file":
                fs.rm_file(path)
            else:
                fs.rm(path, recursive=True)
