"""Store: checkpoints as directories on any fsspec filesystem, each described by a manifest written
last.

    <store>/step-000000001000/__0_17.distcp ...  the state, in PyTorch's Distributed Checkpoint
                                                 format
    <store>/step-000000001000/.metadata          what lies where, in the same format
    <store>/step-000000001000/keepstep.json      the manifest: a checksum of every 4 MiB block
                                                 above, and of itself

A fresh start writes into a directory of its own beside them: `runs.py`.

Comes in: bytes under file names, and what is said about them. Goes out: checkpoints that exist, and
bytes that were verified before they were handed out. Never knows what the bytes mean, never touches
another step's directory.

Several processes, on several machines, may write files of one checkpoint; one of them leads: it
begins, and it publishes.

Invariant: a checkpoint exists exactly when its manifest does. The manifest appears by a rename
after everything it names is on stable storage, and is the first to go.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from keepstep.edge.store.checked_file import (
    BLOCK_BYTES,
    FilePlace,
    SummedFile,
    VerifiedFile,
    check_size,
    store_errors,
)
from keepstep.edge.store.manifest import FileSum, Manifest, manifest_from_bytes
from keepstep.edge.store.runs import begin_run, newest_run, run_path
from keepstep.errors import DamageError, StoreError

MANIFEST = "keepstep.json"
UNPUBLISHED = f"{MANIFEST}.tmp"

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_STEP_DIR = re.compile(r"step-(\d{12})")


@dataclass(frozen=True, slots=True)
class Listing:
    """What a store holds: `checkpoints` with an intact manifest and files of the right size, newest
    first; and per step why the directory is not one of them. `unreadable`: those of them of which
    the store did not say what they are. `damaged`: those that were published, and are not as they
    were."""

    checkpoints: tuple[Manifest, ...]
    broken: Mapping[int, str]
    unreadable: frozenset[int] = frozenset()
    damaged: frozenset[int] = frozenset()


class Store:
    """A directory of checkpoints, read by any number of processes."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        fs: AbstractFileSystem | None = None,
        block_bytes: int = BLOCK_BYTES,
        **storage_options: Any,
    ) -> None:
        """fs: where the URL's path lies; the URL's own filesystem unless given. block_bytes: of a
        file written here, how many share a checksum. storage_options: of the URL's filesystem.

        Raises StoreError when no filesystem answers to the URL. Touches nothing yet.
        """
        if fs is None:
            try:
                fs, root = url_to_fs(os.fspath(url), **storage_options)
            except (ValueError, ImportError, OSError) as error:
                raise StoreError(
                    f"store {url}: expected a directory or an fsspec URL, found {error}"
                ) from error
        else:
            root = str(fs._strip_protocol(os.fspath(url)))
        self._fs = fs
        self._base = self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        self._disk = self._root if self._local else ""  # whose room a full store tells
        self.block_bytes = block_bytes

    def follow(self) -> Store:
        """What follows is about the newest run in the store (`runs.py`), until this is said again.
        Without it, about the first. Returns itself. Raises StoreError."""
        self._root = run_path(self._base, newest_run(self._fs, self._base))
        return self

    @property
    def run_directory(self) -> str:
        """Of the run that it is about, below the store; empty for the first, which has none."""
        directory: str = self._root[len(self._base) :]
        return directory

    def begin_run(self) -> str | None:
        """Begin another run, unless the newest one has nothing yet, and follow it: where that is.
        Raises StoreError."""
        number = newest_run(self._fs, self._base)
        self._root = run_path(self._base, number)
        if not self._steps():
            return None
        begun = self._root = begin_run(self._fs, self._base, number + 1)
        with store_errors(f"beginning {begun}", self._disk):
            for path in (begun, self._base):
                self._sync_directory(path)
        return begun

    def url(self, step: int) -> str:
        """The checkpoint's directory, as `torch.distributed.checkpoint` takes it for
        `checkpoint_id`."""
        path = self._path(step)
        return path if self._local else str(self._fs.unstrip_protocol(path))

    def place(self, step: int, name: str) -> FilePlace:
        return FilePlace(self._fs, self._path(step, name), f"{self.url(step)}/{name}", self._disk)

    # -- reading

    def published(self) -> tuple[Manifest, ...]:
        """All checkpoints that exist, newest first. Raises StoreError."""
        return self.list_checkpoints().checkpoints

    def list_checkpoints(self) -> Listing:
        """Reads every manifest, no data. Raises StoreError when the store cannot be read."""
        intact: list[Manifest] = []
        broken: dict[int, str] = {}
        unreadable: set[int] = set()
        damaged: set[int] = set()
        for step in sorted(self._steps(), reverse=True):
            try:
                raw = self.read_small(step, MANIFEST)
                entries = self._entries(step)
            except StoreError as error:
                broken[step] = str(error)
                unreadable.add(step)
                continue
            try:
                manifest = self._manifest(step, raw)
                self._check_entries(manifest, entries)
                intact.append(manifest)
            except (DamageError, StoreError) as error:
                broken[step] = str(error)
                if raw is not None:
                    damaged.add(step)
        return Listing(tuple(intact), broken, frozenset(unreadable), frozenset(damaged))

    def usable(self) -> tuple[list[int], dict[int, str]]:
        """See `ports.Checkpoints`. Raises StoreError, too, when there is no usable one and what
        there is could not be read, or is damaged: that is not a store without checkpoints."""
        listing = self.follow().list_checkpoints()
        lost = listing.unreadable | listing.damaged
        if lost and not listing.checkpoints:
            raise StoreError(f"{listing.broken[max(lost)]}. Mend it, or name another store")
        return [manifest.step for manifest in listing.checkpoints], dict(listing.broken)

    def read_manifest(self, step: int) -> Manifest:
        """Raises StoreError when there is none, DamageError when it is not as written."""
        return self._manifest(step, self.read_small(step, MANIFEST))

    def _manifest(self, step: int, raw: bytes | None) -> Manifest:
        """What these bytes of a manifest's file say."""
        where = f"{self.url(step)}/{MANIFEST}"
        if raw is None:
            raise StoreError(
                f"{self.url(step)}: expected a manifest, found none: never finished, or "
                "being removed"
            )
        manifest = manifest_from_bytes(raw, where)
        if manifest.step != step:
            raise DamageError(
                f"{where}: expected the manifest of step {step}, found that of step {manifest.step}"
            )
        return manifest

    def read_small(self, step: int, name: str) -> bytes | None:
        """A file's bytes as they are, for who can tell whether they are right; None when it is not
        there."""
        with store_errors(f"reading {self.url(step)}/{name}"):
            try:
                raw: bytes = self._fs.cat_file(self._path(step, name))
            except FileNotFoundError:
                return None
        return raw

    def verify(self, step: int, progress: Progress | None = None) -> Manifest:
        """Read every byte back. Raises DamageError naming the file, the block, expected and
        found."""
        manifest = self.read_manifest(step)
        done = 0
        for name in manifest.files:
            for block in self.open(manifest, name).blocks():
                done += len(block)
                if progress is not None:
                    progress(done, manifest.total_bytes)
        return manifest

    def intact(self, step: int) -> Manifest | None:
        """The manifest of a checkpoint whose every byte is as written, else None. Raises StoreError
        when it cannot be read."""
        if not self.exists(step):
            return None
        try:
            return self.verify(step)
        except DamageError:
            return None

    def open(self, manifest: Manifest, name: str) -> VerifiedFile:
        """One file of a checkpoint. Raises DamageError when it is missing or has another size."""
        place = self.place(manifest.step, name)
        if name not in manifest.files:
            raise DamageError(
                f"{place.where}: expected one of the manifest's files "
                f"({', '.join(manifest.files)}), found another"
            )
        return VerifiedFile(place, manifest.files[name])

    def exists(self, step: int) -> bool:
        with store_errors(f"looking for {self.url(step)}/{MANIFEST}"):
            return self._is_there(self._path(step, MANIFEST))

    def check_sizes(self, manifest: Manifest) -> None:
        """Raises DamageError when a file of the manifest is missing or has another size."""
        self._check_entries(manifest, self._entries(manifest.step))

    def _entries(self, step: int) -> list[dict[str, Any]]:
        """What is in a checkpoint's directory; nothing when it is not there."""
        with store_errors(f"listing {self.url(step)}"):
            try:
                entries: list[dict[str, Any]] = self._fs.ls(self._path(step), detail=True)
            except FileNotFoundError:
                return []
        return entries

    def _check_entries(self, manifest: Manifest, entries: list[dict[str, Any]]) -> None:
        found = {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in entries}
        for name, sums in manifest.files.items():
            check_size(f"{self.url(manifest.step)}/{name}", sums.bytes, found.get(name))

    # -- writing

    def draft(
        self,
        step: int,
        progress: Callable[[int], None] | None = None,
        mine: Callable[[str], bool] = lambda _: True,
    ) -> Draft:
        """Begin a checkpoint, in place of what earlier attempts left. Raises StoreError when the
        step already has a manifest.

        mine: tells this attempt's files from those of others by their names.
        """
        assert 0 <= step < 10**12, f"step {step} does not fit into 12 digits"
        if self.exists(step):
            raise StoreError(f"{self.url(step)}: expected no checkpoint, found one")
        draft = self.join(step, progress, mine)
        self.clear(step, keep=mine)
        return draft

    def join(
        self,
        step: int,
        progress: Callable[[int], None] | None = None,
        mine: Callable[[str], bool] = lambda _: True,
    ) -> Draft:
        """Write files of a checkpoint that another process begins and publishes."""
        with store_errors(f"creating {self.url(step)}", self._disk):
            self._fs.makedirs(self._path(step), exist_ok=True)
        return Draft(self, step, progress, mine)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, manifest first: from then on it does not exist, however far the rest
        comes. Nothing there is fine."""
        self.retract(step)
        with store_errors(f"removing {self.url(step)}"):
            if self._is_there(self._path(step)):
                self._fs.rm(self._path(step), recursive=True)

    def retract(self, step: int) -> None:
        """Remove the manifest alone: the checkpoint does not exist any more."""
        with store_errors(f"removing {self.url(step)}"):
            if self._is_there(self._path(step, MANIFEST)):
                self._fs.rm_file(self._path(step, MANIFEST))
                self._sync_directory(self._path(step))

    def clear(self, step: int, keep: Callable[[str], bool]) -> None:
        """Remove the files of a checkpoint that does not exist, but for those to keep."""
        with store_errors(f"clearing {self.url(step)}"):
            self._fs.invalidate_cache()
            with suppress(FileNotFoundError):  # nothing there, or another process clears as well
                for entry in self._fs.ls(self._path(step), detail=True):
                    if entry["type"] == "file" and not keep(entry["name"].rsplit("/", 1)[-1]):
                        self._fs.rm_file(entry["name"])

    def remove_incomplete(self, but: int | None = None) -> list[int]:
        """Remove what has no manifest, `but` one step. Only for whoever leads: a checkpoint being
        written has none either."""
        incomplete = [
            step for step in sorted(self._steps()) if step != but and not self.exists(step)
        ]
        for step in incomplete:
            self.remove(step)
        return incomplete

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._root}/step-{step:012d}" + (f"/{name}" if name else "")

    def _steps(self) -> list[int]:
        with store_errors(f"listing {self._root}"):
            self._fs.invalidate_cache()  # another process writes what this one lists
            try:
                paths = self._fs.ls(self._root or "/", detail=False)
            except FileNotFoundError:
                return []
            if paths and self._fs.isfile(self._root):  # `ls` of a file is the file itself
                raise NotADirectoryError(f"expected a directory, found a file: {self._root}")
        matches = (_STEP_DIR.fullmatch(path.rstrip("/").rsplit("/", 1)[-1]) for path in paths)
        return [int(m[1]) for m in matches if m]

    def _is_there(self, path: str) -> bool:
        """Raises OSError when that cannot be seen: fsspec's own `exists` says no then, and what is
        not there may be removed with all its files."""
        self._fs.invalidate_cache()
        try:
            self._fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _rename(self, step: int, name: str, new_name: str) -> None:
        self._fs.mv(self._path(step, name), self._path(step, new_name))

    def _remove_directory(self, step: int) -> None:
        with store_errors(f"removing {self.url(step)}"):
            # or it is not empty, or the store has no directories
            self._fs.rmdir(self._path(step))

    def _sync_directory(self, path: str) -> None:
        if self._local:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


@dataclass
class Draft:
    """A checkpoint being written: it does not exist until `publish`. As a context left without
    that, it is removed.

    `failure` is the first write that failed: torch's own writer answers a failed write with an
    error about itself.
    """

    store: Store
    step: int
    progress: Callable[[int], None] | None
    mine: Callable[[str], bool]
    files: dict[str, FileSum] = field(default_factory=dict)
    failure: StoreError | None = None
    published: bool = False
    begun: set[str] = field(default_factory=set)

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
            # a rename may have come through and still be called a failure
            if not self.store.exists(self.step):
                self.store.clear(
                    self.step, keep=lambda name: not (self.mine(name) or name in self.begun)
                )
                self.store._remove_directory(self.step)

    def open(self, name: str) -> SummedFile:
        """A new file, open for writing. Raises StoreError, as every write to it may."""
        self.begun.add(name)
        return SummedFile(self.store.place(self.step, name), self, self.store.block_bytes)

    def wrote(self, count: int) -> None:
        if self.progress is not None:
            self.progress(count)

    def finished(self, name: str, sums: FileSum) -> None:
        self.files[name] = sums

    def failed(self, error: StoreError) -> None:
        self.failure = self.failure or error

    def rename(self, name: str, new_name: str) -> None:
        with store_errors(f"renaming {name} to {new_name} in {self.store.url(self.step)}"):
            self.store._rename(self.step, name, new_name)
        self.begun.add(new_name)
        self.files[new_name] = self.files.pop(name)

    def read_back(self, names: Iterable[str]) -> None:
        """Verify what was written here. Raises DamageError naming the file, the block, expected and
        found."""
        for name in names:
            for block in VerifiedFile(self.store.place(self.step, name), self.files[name]).blocks():
                self.wrote(len(block))

    def publish(self, manifest: Manifest) -> None:
        """Let the checkpoint exist, with the manifest's files and no others. They have been read
        back by whoever wrote them.

        Raises DamageError when a file of the manifest is missing or has another size.
        """
        assert manifest.step == self.step and not self.failure
        assert all(manifest.files.get(name, sums) == sums for name, sums in self.files.items())
        store, path = self.store, self.store._path(self.step)
        with self.open(UNPUBLISHED) as file:
            file.write(manifest.to_bytes())
        self.read_back([UNPUBLISHED])
        store.clear(self.step, keep=lambda name: name in manifest.files or name == UNPUBLISHED)
        store.check_sizes(manifest)
        with store_errors(f"publishing {store.url(self.step)}", store._disk):
            store._sync_directory(path)
            store._rename(self.step, UNPUBLISHED, MANIFEST)
            self.published = True
            store._sync_directory(path)
            store._sync_directory(store._root)
        del self.files[UNPUBLISHED]
