"""Draft: a checkpoint being written.

Comes in: files, then what is said about all of them. Goes out: a checkpoint, or nothing.

Invariant: the manifest appears whole, in place of nothing, after everything it names is on stable
storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from keepstep.edge.store.checked_file import SummedFile, VerifiedFile, store_errors
from keepstep.edge.store.manifest import FileSum, Manifest
from keepstep.edge.store.signer import Signer
from keepstep.errors import StoreError
from keepstep.model.checkpoint import CheckpointName

if TYPE_CHECKING:
    from keepstep.edge.store.store import Store

MANIFEST = "keepstep.json"
UNPUBLISHED = f"{MANIFEST}.tmp"


@dataclass
class Draft:
    """A checkpoint being written, in a directory of its attempt's own: it does not exist until
    `publish`. As a context left without that, it is removed.

    `failure` is the first write that failed: torch's own writer answers a failed write with an
    error about itself.
    """

    store: Store
    name: CheckpointName
    progress: Callable[[int], None] | None
    files: dict[str, FileSum] = field(default_factory=dict)
    failure: StoreError | None = None
    published: bool = False
    tried: bool = False  # to publish it: that may come through even after it was called a failure

    @property
    def url(self) -> str:
        """Where it is to be."""
        return self.store.url(self.name)

    @property
    def signer(self) -> Signer | None:
        """Who signs what nodes say of it; None where nobody does."""
        return self.store.signer

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Remove this attempt's files, whoever wrote them, unless there is a checkpoint. Only for
        who leads it."""
        if self.published:
            return
        # the store is failing already; without a manifest what is left means nothing
        with suppress(StoreError):
            if self.tried:
                self.store.remove_unpublished(self.name)
            elif not self.store.exists(self.name):
                self.store.remove(self.name)

    def open(self, file: str) -> SummedFile:
        """A new file, open for writing. Raises StoreError, as every write to it may."""
        place = self.store.place(self.name, file)
        return SummedFile(place, self, self.store.block_bytes, self.signer)

    def read_small(self, file: str) -> tuple[bytes, str]:
        """A file's bytes as they are, and where it lies. Raises StoreError when it is not there."""
        where = f"{self.url}/{file}"
        raw = self.store.read_small(self.name, file)
        if raw is None:
            raise StoreError(
                f"{where}: expected what a node says about this attempt, found no file"
            )
        return raw, where

    def wrote(self, count: int) -> None:
        if self.progress is not None:
            self.progress(count)

    def finished(self, name: str, sums: FileSum) -> None:
        self.files[name] = sums

    def failed(self, error: StoreError) -> None:
        self.failure = self.failure or error

    def rename(self, name: str, new_name: str) -> None:
        with store_errors(f"renaming {name} to {new_name} in {self.url}"):
            self.store.rename(self.name, name, new_name)
        self.files[new_name] = self.files.pop(name)

    def read_back(self, names: Iterable[str]) -> None:
        """Verify what was written here. Raises DamageError naming the file, the block, expected and
        found."""
        for name in names:
            place, sums = self.store.place(self.name, name), self.files[name]
            for block in VerifiedFile(place, sums, self.signer).blocks():
                self.wrote(len(block))

    def publish(self, manifest: Manifest) -> None:
        """Let the checkpoint exist, with the manifest's files and no others. They have been read
        back by whoever wrote them.

        Raises DamageError when a file of the manifest is missing or has another size.
        """
        assert manifest.name == self.name and not self.failure
        assert all(manifest.files.get(name, sums) == sums for name, sums in self.files.items())
        store, path = self.store, self.store.path(self.name)
        raw = manifest.to_bytes(self.signer)
        with self.open(UNPUBLISHED) as file:
            file.write(raw)
        self.read_back([UNPUBLISHED])
        kept = {*manifest.files, UNPUBLISHED, MANIFEST}
        store.clear(self.name, keep=lambda name: name in kept)
        store.check_sizes(manifest)
        with store_errors(f"publishing {self.url}", store.disk):
            store.sync_directory(path)
            self.tried = True
            store.put_new(self.name, UNPUBLISHED, MANIFEST, raw)
            self.published = True
            store.sync_directory(path)
            store.sync_directory(store.root)
        del self.files[UNPUBLISHED]
