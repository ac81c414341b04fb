"""Stored file: one file of a checkpoint, summed while it is written and verified while it is read.

Comes in: bytes, or a file and its sums. Goes out: the sums, or bytes that were verified first.
Never hands out a byte of a block whose checksum is wrong, never says that a local file is written
before it is on the disk.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash
from fsspec.implementations.local import LocalFileSystem

from keepstep.edge.store.manifest import FileSum
from keepstep.errors import DamageError, StoreError
from keepstep.model.units import MIB, human_bytes

BLOCK_BYTES = 4 * MIB
CACHED_BLOCKS = 4  # the end of a file (its directory), the block being read and its neighbours


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where a file lies. `where` is how a sentence names it, `root` the directory of this machine
    whose room counts; empty when it is on none."""

    fs: Any
    path: str
    where: str
    root: str

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    def size(self) -> int | None:
        """None when there is no such file."""
        with store_errors(f"reading {self.where}"):
            try:
                return int(self.fs.size(self.path))
            except FileNotFoundError:
                return None


class FileLedger(Protocol):
    """Who hears what becomes of a file being written."""

    def wrote(self, count: int) -> None: ...

    def finished(self, name: str, sums: FileSum) -> None: ...

    def failed(self, error: StoreError) -> None: ...


class SummedFile(io.RawIOBase):
    """A file being written, summed while the bytes pass. Local files are on disk when it is
    closed."""

    def __init__(
        self, place: FilePlace, ledger: FileLedger, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self._place, self._ledger = place, ledger
        self._block_bytes = block_bytes
        self._bytes = 0
        self._blocks: list[str] = []
        self._hash = xxhash.xxh3_64()
        self._file: Any = None
        with self._noted():
            self._file = place.fs.open(place.path, "wb")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: Any, /) -> int:
        with self._noted(), memoryview(data).cast("B") as view:
            self._file.write(view)
            self._sum(view)
            self._ledger.wrote(len(view))
            return len(view)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._file is None:
            return
        with self._noted():
            try:
                if isinstance(self._place.fs, LocalFileSystem):
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    # So that reading back asks the disk, not the memory the bytes were just written
                    # from.
                    os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                self._file.close()
        if self._bytes % self._block_bytes:
            self._blocks.append(self._hash.hexdigest())
        self._ledger.finished(
            self._place.name, FileSum(self._bytes, self._block_bytes, tuple(self._blocks))
        )

    def _sum(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            part = view[at : at + self._block_bytes - self._bytes % self._block_bytes]
            self._hash.update(part)
            self._bytes += len(part)
            at += len(part)
            if self._bytes % self._block_bytes == 0:
                self._blocks.append(self._hash.hexdigest())
                self._hash.reset()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            with store_errors(f"writing {self._place.where}", self._place.root):
                yield
        except StoreError as error:
            self._ledger.failed(error)
            raise


class VerifiedFile(io.RawIOBase):
    """A checkpoint's file, read only, seekable: every byte it hands out lies in a block whose
    checksum was right."""

    def __init__(self, place: FilePlace, sums: FileSum) -> None:
        """Raises DamageError when the file is missing or has another size."""
        check_size(place.where, sums.bytes, place.size())
        self._place, self._sums = place, sums
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
            raise OSError(errno.EINVAL, f"seek to {base + offset} in {self._place.where}")
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

    def blocks(self) -> Iterator[bytes]:
        """Every block, verified now."""
        return (self.read_block(index) for index in range(len(self._sums.xxh3_64)))

    def read_block(self, index: int) -> bytes:
        """One block, verified now."""
        start = index * self._sums.block_bytes
        end = min(start + self._sums.block_bytes, self._sums.bytes)
        where = self._place.where
        with store_errors(f"reading {where}"):
            data: bytes = self._place.fs.cat_file(self._place.path, start=start, end=end)
        expected, found = self._sums.xxh3_64[index], xxhash.xxh3_64_hexdigest(data)
        if found != expected:
            raise DamageError(
                f"{where}: block {index} (bytes {start} to {end}): expected xxh3_64 "
                f"{expected}, found {found} over {len(data)} bytes"
            )
        return data

    def _cached(self, index: int) -> bytes:
        data = self._cache.pop(index, None)
        self._cache[index] = self.read_block(index) if data is None else data
        if len(self._cache) > CACHED_BLOCKS:
            del self._cache[next(iter(self._cache))]  # the one not used for longest
        return self._cache[index]


def check_size(where: str, expected_bytes: int, found_bytes: int | None) -> None:
    """Raises DamageError when they differ; None is no file at all."""
    if found_bytes != expected_bytes:
        found = "no file" if found_bytes is None else f"{found_bytes} bytes"
        raise DamageError(f"{where}: expected {expected_bytes} bytes, found {found}")


@contextmanager
def store_errors(doing: str, root: str = "") -> Iterator[None]:
    """The world's trouble as StoreError, with the room left when that was the trouble."""
    try:
        yield
    except _trouble() as error:
        room = ""
        if (
            isinstance(error, OSError)
            and error.errno in (errno.ENOSPC, errno.EDQUOT)
            and os.path.isdir(root)
        ):
            room = f" with {human_bytes(shutil.disk_usage(root).free)} free"
        raise StoreError(
            f"{doing}: expected it to succeed, found {type(error).__name__}: {error}{room}"
        ) from error


def _trouble() -> tuple[type[BaseException], ...]:
    # s3fs turns what the service answers into OSError, but lets botocore's own errors (no endpoint,
    # no credentials) through.
    botocore = sys.modules.get("botocore.exceptions")
    return (
        (OSError,) if botocore is None else (OSError, botocore.BotoCoreError, botocore.ClientError)
    )
