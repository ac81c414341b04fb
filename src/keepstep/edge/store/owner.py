"""Owner: whose a store is. Another job's checkpoints are neither taken nor removed, unless a person
says that they are this one's now.

    <store>/keepstep-owner.json     the job; written before its first checkpoint

Where the record is missing or torn, it is whose checkpoints lie there; the next who claims it
writes it anew. Where the job has a secret it is signed. Of a record without that signature it is
believed whom it keeps out, not whose checkpoints it lets in.

Comes in: a filesystem, the store's directory, who uses it. Goes out: nothing, or an error that says
whose it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fsspec.spec import AbstractFileSystem

from keepstep.edge.store.checked_file import read_whole, store_errors
from keepstep.edge.store.manifest import FORMAT_VERSION, seal, unseal
from keepstep.edge.store.signer import Signer, sign_of
from keepstep.errors import DamageError, IdentityError
from keepstep.model.decoding import a_list, a_name, decoding

OWNER = "keepstep-owner.json"


class OwnerRecord(NamedTuple):
    """`job`: None when the file says none that can be read, or is not there. `adopted`: the jobs
    whose checkpoints it has taken over."""

    job: str | None
    is_there: bool
    adopted: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StoreUser:
    """A job. `adopts`: what others have left in the store is its own from now on."""

    job: str
    adopts: bool = False

    def check(self, root: str, owners: Iterable[str]) -> None:
        """owners: the jobs that have a right to the store; nobody: it is free. Raises
        IdentityError."""
        others = sorted(owners)
        if self.adopts or not others or self.job in others:
            return
        raise IdentityError(
            f"store {root}: expected the checkpoints of job {self.job!r}, found those of "
            f"{others[0]!r}. Give each job a store of its own; or go on from these, which stay: "
            f"--job {others[0]} if it is the same job, else --adopt (KEEPSTEP_ADOPT=1)"
        )


def read_owner(fs: AbstractFileSystem, root: str, signer: Signer | None = None) -> OwnerRecord:
    """What the store says of itself. `signer`: who must have signed what was adopted. Raises
    StoreError."""
    path = f"{root}/{OWNER}"
    try:
        with store_errors(f"reading {path}"):
            try:
                raw = read_whole(fs, path, path)
            except NotADirectoryError:
                raw = None
        if raw is None:
            return OwnerRecord(None, is_there=False)
        body = unseal(raw, path)
        with decoding(path):
            adopted = frozenset(map(a_name, a_list(body.get("adopted", []))))
            record = OwnerRecord(a_name(body["job"]), is_there=True, adopted=adopted)
    except DamageError:
        return OwnerRecord(None, is_there=True)
    try:
        unseal(raw, path, sign_of(signer, "owner"))
    except DamageError:
        return record._replace(adopted=frozenset())
    return record


def owner_record(job: str, adopted: Iterable[str] = (), signer: Signer | None = None) -> bytes:
    """What the store is to say of itself."""
    body = {"format": FORMAT_VERSION, "job": job, "adopted": sorted(adopted)}
    return seal(body, sign=sign_of(signer, "owner"))
