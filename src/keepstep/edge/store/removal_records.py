"""Removal records: the lease on removing (`core/recovery/removal_lease.py`), as it stands in a
store.

    <store>/keepstep-removals-000000000007.json     the seventh: who may remove, in which epoch

Each is put in place of none: a link on a disk, a conditional put on an object store. The newest
that is whole, and signed where the job has a secret, is the one that counts; older ones are removed
by who has written a newer one. A run has its own, in its directory.

Comes in: a filesystem, the run's directory, records. Goes out: the newest, or that one was put.
"""

from __future__ import annotations

import re
from contextlib import suppress

from fsspec.spec import AbstractFileSystem

from keepstep.edge.store.checked_file import put_whole, read_whole, store_errors
from keepstep.edge.store.manifest import FORMAT_VERSION, seal, unseal
from keepstep.edge.store.signer import Signer, sign_of
from keepstep.errors import DamageError
from keepstep.model.decoding import a_count, a_text, decoding
from keepstep.model.removal import RemovalRecord

MOST_STRANGE = 32  # records that prove nothing, before the newest that does

_RECORD = re.compile(r"keepstep-removals-(\d{12})\.json", re.ASCII)


def newest_removal(
    fs: AbstractFileSystem, root: str, signer: Signer | None
) -> RemovalRecord | None:
    """Raises StoreError."""
    for number in _numbers(fs, root)[:MOST_STRANGE]:
        path = _path(root, number)
        try:
            with store_errors(f"reading {path}"):
                raw = read_whole(fs, path, path)
            record = None if raw is None else _record(raw, path, signer)
        except DamageError:  # torn, or a stranger's
            continue
        if record is not None and record.number == number:
            return record
    return None


def put_removal(
    fs: AbstractFileSystem, root: str, record: RemovalRecord, signer: Signer | None
) -> bool:
    """False where that number has its record. Raises StoreError."""
    body = {
        "format": FORMAT_VERSION,
        "number": record.number,
        "epoch": record.epoch,
        "holder": record.holder,
        "is_held": record.is_held,
    }
    path = _path(root, record.number)
    with store_errors(f"writing {path}"):
        try:
            put_whole(fs, path, seal(body, sign=sign_of(signer, "removals")))
        except FileExistsError:
            return False
    return True


def forget_removals(fs: AbstractFileSystem, root: str, before: int) -> None:
    """Remove those that count no more. Raises StoreError."""
    for number in _numbers(fs, root):
        if number < before:
            path = _path(root, number)
            with store_errors(f"removing {path}"), suppress(FileNotFoundError):
                fs.rm_file(path)


def _path(root: str, number: int) -> str:
    return f"{root}/keepstep-removals-{number:012d}.json"


def _numbers(fs: AbstractFileSystem, root: str) -> list[int]:
    """The highest first."""
    with store_errors(f"listing {root}"):
        fs.invalidate_cache()  # others write there
        names: list[str] = []
        with suppress(FileNotFoundError):
            names = [path.rstrip("/").rsplit("/", 1)[-1] for path in fs.ls(root, detail=False)]
    return sorted((int(m[1]) for m in map(_RECORD.fullmatch, names) if m), reverse=True)


def _record(raw: bytes, where: str, signer: Signer | None) -> RemovalRecord:
    body = unseal(raw, where, sign_of(signer, "removals"))
    with decoding(where):
        return RemovalRecord(
            number=a_count(body["number"]),
            epoch=a_count(body["epoch"]),
            holder=a_text(body["holder"]),
            is_held=body["is_held"] is True,
        )
