"""Store: checkpoints as directories on any fsspec filesystem, each described by a manifest written last.

    <store>/step-000000001000/__0_0.distcp ...   the state, in PyTorch's Distributed Checkpoint format
    <store>/step-000000001000/.metadata          what lies where, in the same format
    <store>/step-000000001000/keepstep.json      the manifest: a checksum of every 4 MiB block above, and of itself

Comes in: bytes under file names, and what is said about them. Goes out: checkpoints that exist, and bytes that were
verified before they were handed out. Never knows what the bytes mean, never touches another step's directory.

Invariant: a checkpoint exists exactly when its manifest does. The manifest appears by a rename after everything it names is
on stable storage, and is the first to go.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import xxhash
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from keepstep.errors import DamageError, StoreError
from keepstep.model.units import MIB, human_bytes

MANIFEST = "keepstep.json"
FORMAT_VERSION = 1
BLOCK_BYTES = 4 * MIB
CACHED_BLOCKS = 4  # the end of a file (its directory), the block being read and its neighbours

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_STEP_DIR = re.compile(r"step-(\d{12})")
# The manifest begins with the digest of all that follows these bytes, so that no bit of the file is left out.
_SEAL = re.compile(rb'\{"xxh3_64": "([0-9a-f]{16})",\n')


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file's size and the xxh3_64 of each of its blocks (the last one may be short)."""

    bytes: int
    block_bytes: int
    xxh3_64: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is: whose, when, and the checksums of its files. `fingerprint` is the caller's own."""

    job: str
    step: int
    world_size: int
    metrics: Mapping[str, float]
    wall_ns: int
    fingerprint: Mapping[str, Any]
    files: Mapping[str, FileSum]

    @property
    def total_bytes(self) -> int:
        return sum(f.bytes for f in self.files.values())

    def to_bytes(self) -> bytes:
        body = {
            "format": FORMAT_VERSION,
            "job": self.job,
            "step": self.step,
            "world_size": self.world_size,
            # JSON has no NaN and no infinity, and a loss has both.
            "metrics": {k: float(v) if math.isfinite(v) else str(float(v)) for k, v in self.metrics.items()},
            "wall_ns": self.wall_ns,
            "fingerprint": dict(self.fingerprint),
            "files": {k: {"bytes": f.bytes, "block_bytes": f.block_bytes, "xxh3_64": f.xxh3_64} for k, f in self.files.items()},
        }
        rest = json.dumps(body, indent=1, allow_nan=False).encode()[2:]  # without the opening "{\n", which the seal brings
        return b'{"xxh3_64": "%s",\n%s' % (xxhash.xxh3_64_hexdigest(rest).encode(), rest)


def manifest_from_bytes(raw: bytes, where: str) -> Manifest:
    """The inverse of `Manifest.to_bytes`. Raises DamageError if one bit is not as written, StoreError on a newer format."""
    seal = _SEAL.match(raw)
    if seal is None:
        raise DamageError(f"{where}: expected a manifest that begins with its checksum, found {raw[:32]!r}")
    found = xxhash.xxh3_64_hexdigest(raw[seal.end() :])
    if found != seal[1].decode():
        raise DamageError(f"{where}: block 0: expected xxh3_64 {seal[1].decode()}, found {found}")
    body = json.loads(raw)
    if body["format"] != FORMAT_VERSION:
        raise StoreError(f"{where}: expected manifest format {FORMAT_VERSION}, found {body['format']!r}")
    return Manifest(
        job=body["job"],
        step=body["step"],
        world_size=body["world_size"],
        metrics={k: float(v) for k, v in body["metrics"].items()},
        wall_ns=body["wall_ns"],
        fingerprint=body["fingerprint"],
        files={k: FileSum(f["bytes"], f["block_bytes"], tuple(f["xxh3_64"])) for k, f in body["files"].items()},
    )


@dataclass(frozen=True, slots=True)
class Listing:
    """What a store holds: `checkpoints` with an intact manifest and files of the right size, newest first; and per
    step why the directory is not one of them."""

    checkpoints: tuple[Manifest, ...]
    broken: Mapping[int, str]


class Store:
    """A directory of checkpoints, written by one process at a time and read by any number."""

    def __init__(self, url: str | os.PathLike[str], **storage_options: Any) -> None:
        """Raises StoreError when no filesystem answers to the URL. Touches nothing yet."""
        try:
            self._fs, root = url_to_fs(os.fspath(url), **storage_options)
        except (ValueError, ImportError) as error:
            raise StoreError(f"store {url}: expected a directory or an fsspec URL, found {error}") from error
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)

    def url(self, step: int) -> str:
        """The checkpoint's directory, as `torch.distributed.checkpoint` takes it for `checkpoint_id`."""
        path = self._path(step)
        return path if self._local else str(self._fs.unstrip_protocol(path))

    def list_checkpoints(self) -> Listing:
        """Reads every manifest, no data. Raises StoreError when the store cannot be read."""
        intact, broken = [], {}
        for step in sorted(self._steps(), reverse=True):
            try:
                manifest = self.read_manifest(step)
                self._check_sizes(manifest)
                intact.append(manifest)
            except (DamageError, StoreError) as error:
                broken[step] = str(error)
        return Listing(tuple(intact), broken)

    def read_manifest(self, step: int) -> Manifest:
        """Raises StoreError when there is none, DamageError when it is not as written."""
        where = f"{self.url(step)}/{MANIFEST}"
        with _io(f"reading {where}"):
            try:
                raw = self._fs.cat_file(self._path(step, MANIFEST))
            except FileNotFoundError:
                raise StoreError(f"{self.url(step)}: expected a manifest, found none: never finished, or being removed") from None
        manifest = manifest_from_bytes(raw, where)
        if manifest.step != step:
            raise DamageError(f"{where}: expected the manifest of step {step}, found that of step {manifest.step}")
        return manifest

    def verify(self, step: int, progress: Progress | None = None) -> Manifest:
        """Read every byte back. Raises DamageError naming the file, the block, expected and found."""
        manifest = self.read_manifest(step)
        done = 0
        for name, sums in manifest.files.items():
            file = self.open(manifest, name)
            for index in range(len(sums.xxh3_64)):
                done += len(file.read_block(index))
                if progress is not None:
                    progress(done, manifest.total_bytes)
        return manifest

    def intact(self, step: int) -> Manifest | None:
        """The manifest of a checkpoint whose every byte is as written, else None. Raises StoreError when it cannot be read."""
        if not self._exists(step, MANIFEST):
            return None
        try:
            return self.verify(step)
        except DamageError:
            return None

    def open(self, manifest: Manifest, name: str) -> VerifiedFile:
        """One file of a checkpoint. Raises DamageError when it is missing or has another size."""
        where = f"{self.url(manifest.step)}/{name}"
        sums = manifest.files.get(name)
        if sums is None:
            raise DamageError(f"{where}: expected one of the manifest's files ({', '.join(manifest.files)}), found another")
        path = self._path(manifest.step, name)
        with _io(f"reading {where}"):
            try:
                found_bytes = self._fs.size(path)
            except FileNotFoundError:
                found_bytes = None
        _check_size(where, sums.bytes, found_bytes)
        return VerifiedFile(self._fs, path, where, sums)

    def draft(self, step: int, progress: Callable[[int], None] | None = None) -> Draft:
        """Begin a checkpoint, in place of what an earlier attempt left. Raises StoreError when the step already has a manifest."""
        assert 0 <= step < 10**12, f"step {step} does not fit into 12 digits"
        if self._exists(step, MANIFEST):
            raise StoreError(f"{self.url(step)}: expected no checkpoint, found one")
        self.remove(step)
        with _io(f"creating {self.url(step)}", self._root):
            self._fs.makedirs(self._path(step), exist_ok=True)
        return Draft(self, step, progress)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, manifest first: from then on it does not exist, however far the rest comes. Nothing there is fine."""
        path = self._path(step)
        with _io(f"removing {self.url(step)}"):
            self._fs.invalidate_cache()
            if self._fs.exists(self._path(step, MANIFEST)):
                self._fs.rm_file(self._path(step, MANIFEST))
                self._sync_directory(path)
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    def remove_incomplete(self) -> list[int]:
        """Remove what has no manifest. Only for the one process that writes: a checkpoint being written has none either."""
        incomplete = [step for step in sorted(self._steps()) if not self._exists(step, MANIFEST)]
        for step in incomplete:
            self.remove(step)
        return incomplete

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._root}/step-{step:012d}" + (f"/{name}" if name else "")

    def _exists(self, step: int, name: str) -> bool:
        with _io(f"looking for {self.url(step)}/{name}"):
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._path(step, name)))

    def _steps(self) -> list[int]:
        with _io(f"listing {self._root}"):
            self._fs.invalidate_cache()  # another process writes what this one lists
            try:
                paths = self._fs.ls(self._root or "/", detail=False)
            except FileNotFoundError:
                return []
            if paths and self._fs.isfile(self._root):  # `ls` of a file is the file itself
                raise NotADirectoryError(f"expected a directory, found a file: {self._root}")
        matches = (_STEP_DIR.fullmatch(path.rstrip("/").rsplit("/", 1)[-1]) for path in paths)
        return [int(m[1]) for m in matches if m]

    def _check_sizes(self, manifest: Manifest) -> None:
        with _io(f"listing {self.url(manifest.step)}"):
            entries = self._fs.ls(self._path(manifest.step), detail=True)
        found = {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in entries}
        for name, sums in manifest.files.items():
            _check_size(f"{self.url(manifest.step)}/{name}", sums.bytes, found.get(name))

    def _sync_directory(self, path: str) -> None:
        if self._local:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


@dataclass
class Draft:
    """A checkpoint being written: it does not exist until `publish`. Left without that, it is removed.

    `failure` is the first write that failed: torch's own writer answers a failed write with an error about itself.
    """

    store: Store
    step: int
    progress: Callable[[int], None] | None = None
    files: dict[str, FileSum] = field(default_factory=dict)
    failure: StoreError | None = None
    published: bool = False

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.published:
            with suppress(StoreError):  # the store is failing already; without a manifest what is left means nothing
                self.store.remove(self.step)

    def open(self, name: str) -> SummedFile:
        """A new file, open for writing. Raises StoreError, as every write to it may."""
        return SummedFile(self, name)

    def rename(self, name: str, new_name: str) -> None:
        store = self.store
        with _io(f"renaming {name} to {new_name} in {store.url(self.step)}"):
            store._fs.mv(store._path(self.step, name), store._path(self.step, new_name))
        self.files[new_name] = self.files.pop(name)

    def publish(self, manifest: Manifest) -> None:
        """Let the checkpoint exist. `manifest.files` must be what was written here."""
        assert manifest.step == self.step and manifest.files == self.files and not self.failure
        store, temporary = self.store, f"{MANIFEST}.tmp"
        with SummedFile(self, temporary) as file:
            file.write(manifest.to_bytes())
        with _io(f"publishing {store.url(self.step)}", store._root):
            store._sync_directory(store._path(self.step))
            store._fs.mv(store._path(self.step, temporary), store._path(self.step, MANIFEST))
            self.published = True
            store._sync_directory(store._path(self.step))
            store._sync_directory(store._root)


class SummedFile(io.RawIOBase):
    """A file being written, summed while the bytes pass. Local files are on disk when it is closed."""

    def __init__(self, draft: Draft, name: str) -> None:
        self._draft, self._name = draft, name
        self._doing = f"writing {draft.store.url(draft.step)}/{name}"
        self._path = draft.store._path(draft.step, name)
        self._bytes = 0
        self._blocks: list[str] = []
        self._hash = xxhash.xxh3_64()
        self._file: Any = None
        with self._noted():
            self._file = draft.store._fs.open(self._path, "wb")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: Any, /) -> int:
        with self._noted(), memoryview(data).cast("B") as view:
            self._file.write(view)
            self._sum(view)
            if self._draft.progress is not None:
                self._draft.progress(len(view))
            return len(view)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._file is None:
            return
        with self._noted():
            try:
                if self._draft.store._local:
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    # So that reading back asks the disk, not the memory the bytes were just written from.
                    os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                self._file.close()
        if self._bytes % BLOCK_BYTES:
            self._blocks.append(self._hash.hexdigest())
        self._draft.files[self._name] = FileSum(self._bytes, BLOCK_BYTES, tuple(self._blocks))

    def _sum(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            part = view[at : at + BLOCK_BYTES - self._bytes % BLOCK_BYTES]
            self._hash.update(part)
            self._bytes += len(part)
            at += len(part)
            if self._bytes % BLOCK_BYTES == 0:
                self._blocks.append(self._hash.hexdigest())
                self._hash.reset()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            with _io(self._doing, self._draft.store._root):
                yield
        except StoreError as error:
            self._draft.failure = self._draft.failure or error
            raise


class VerifiedFile(io.RawIOBase):
    """A checkpoint's file, read only, seekable: every byte it hands out lies in a block whose checksum was right."""

    def __init__(self, fs: Any, path: str, where: str, sums: FileSum) -> None:
        self._fs, self._path, self._where, self._sums = fs, path, where, sums
        self._at = 0
        self._cache: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._sums.bytes}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, f"seek to {base + offset} in {self._where}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fills the buffer up to the end of the file. Raises DamageError, StoreError."""
        with memoryview(buffer).cast("B") as view:
            done = 0
            while done < len(view) and self._at < self._sums.bytes:
                index, start = divmod(self._at, self._sums.block_bytes)
                part = memoryview(self._cached(index))[start : start + len(view) - done]
                view[done : done + len(part)] = part
                done += len(part)
                self._at += len(part)
            return done

    def read_block(self, index: int) -> bytes:
        """One block, verified now."""
        start = index * self._sums.block_bytes
        end = min(start + self._sums.block_bytes, self._sums.bytes)
        with _io(f"reading {self._where}"):
            data: bytes = self._fs.cat_file(self._path, start=start, end=end)
        expected, found = self._sums.xxh3_64[index], xxhash.xxh3_64_hexdigest(data)
        if found != expected:
            raise DamageError(
                f"{self._where}: block {index} (bytes {start} to {end}): expected xxh3_64 {expected}, found {found} over {len(data)} bytes"
            )
        return data

    def _cached(self, index: int) -> bytes:
        data = self._cache.pop(index, None)
        self._cache[index] = self.read_block(index) if data is None else data
        if len(self._cache) > CACHED_BLOCKS:
            del self._cache[next(iter(self._cache))]  # the one not used for longest
        return self._cache[index]


def _check_size(where: str, expected_bytes: int, found_bytes: int | None) -> None:
    if found_bytes != expected_bytes:
        found = "no file" if found_bytes is None else f"{found_bytes} bytes"
        raise DamageError(f"{where}: expected {expected_bytes} bytes, found {found}")


@contextmanager
def _io(doing: str, root: str = "") -> Iterator[None]:
    """The world's trouble as StoreError, with the room left when that was the trouble."""
    try:
        yield
    except _trouble() as error:
        room = ""
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and os.path.isdir(root):
            room = f" with {human_bytes(shutil.disk_usage(root).free)} free"
        raise StoreError(f"{doing}: expected it to succeed, found {type(error).__name__}: {error}{room}") from error


def _trouble() -> tuple[type[BaseException], ...]:
    # s3fs turns what the service answers into OSError, but lets botocore's own errors (no endpoint, no credentials) through.
    botocore = sys.modules.get("botocore.exceptions")
    return (OSError,) if botocore is None else (OSError, botocore.BotoCoreError, botocore.ClientError)
