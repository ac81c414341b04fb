"""Stored file: one file of a checkpoint, summed while it is written and verified while it is read.

Comes in: bytes, or a file and its sums. Goes out: the sums, or bytes that were verified first.
Never hands out a byte of a block whose checksum, or MAC, is wrong, never says that a local file is
written before it is on the disk.
"""

from __future__ import annotations

import errno
import hmac
import io
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import xxhash
from fsspec.implementations.local import LocalFileSystem

from keepstep.edge.store.manifest import FileSum
from keepstep.edge.store.signer import BlockSignature, Signer
from keepstep.errors import DamageError, StoreError
from keepstep.model.decoding import on_a_screen
from keepstep.model.units import GIB, MIB, human_bytes

BLOCK_BYTES = 4 * MIB
# A mounted bucket has no second names for a file; some say so by EPERM.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
MOST_SMALL_BYTES = GIB  # a manifest's: six times what a signed checkpoint of ten TiB takes
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
                check_is_not_behind_a_link(self.fs, self.path)
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
        self,
        place: FilePlace,
        ledger: FileLedger,
        block_bytes: int = BLOCK_BYTES,
        signer: Signer | None = None,
    ) -> None:
        self._place, self._ledger = place, ledger
        self._block_bytes = block_bytes
        self._signer = signer
        self._bytes = 0
        self._blocks: list[str] = []
        self._macs: list[str] = []
        self._begin_block()
        self._file: Any = None
        with self._noted():
            self._file = _opened_new(place)

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
            self._end_block()
        macs = None if self._signer is None else tuple(self._macs)
        self._ledger.finished(
            self._place.name, FileSum(self._bytes, self._block_bytes, tuple(self._blocks), macs)
        )

    def _begin_block(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._mac: BlockSignature | None = None if self._signer is None else self._signer.block()

    def _end_block(self) -> None:
        self._blocks.append(self._hash.hexdigest())
        if self._mac is not None:
            self._macs.append(self._mac.letters())

    def _sum(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            part = view[at : at + self._block_bytes - self._bytes % self._block_bytes]
            self._hash.update(part)
            if self._mac is not None:
                self._mac.update(part)
            self._bytes += len(part)
            at += len(part)
            if self._bytes % self._block_bytes == 0:
                self._end_block()
                self._begin_block()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            with store_errors(f"writing {self._place.where}", self._place.root):
                yield
        except StoreError as error:
            self._ledger.failed(error)
            raise


def _opened_new(place: FilePlace) -> Any:
    """To write to. On a disk it is a file that was not there, in a directory that is one: whoever
    may write to the store could have put a link there, to this user's files elsewhere."""
    if not isinstance(place.fs, LocalFileSystem):
        return place.fs.open(place.path, "wb")
    directory, name = os.path.split(place.path)
    with own_directory(directory) as fd:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)
        return open(name, "xb", opener=partial(_without_links, fd))


def _without_links(directory: int, name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=directory)


@contextmanager
def own_directory(path: str) -> Iterator[int]:
    """Its descriptor, for what is done in it. Raises OSError where a link stands in its place."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def clear_on_disk(directory: str, keep: Callable[[str], bool]) -> None:
    """Remove its files, but for those to keep. Raises OSError."""
    with own_directory(directory) as fd:
        for file in os.listdir(fd):
            is_directory = stat.S_ISDIR(os.stat(file, dir_fd=fd, follow_symlinks=False).st_mode)
            if not is_directory and not keep(file):
                os.unlink(file, dir_fd=fd)


class SeekableFile(io.RawIOBase):
    """To read from any place: `nbytes` long, and read on from `self._at`."""

    def __init__(self, nbytes: int, where: str) -> None:
        self._nbytes, self._where = nbytes, where
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, f"seek to {base + offset} in {self._where}")
        self._at = base + offset
        return self._at


class VerifiedFile(SeekableFile):
    """A checkpoint's file, read only, seekable: every byte it hands out lies in a block whose
    checksum was right, and its MAC where somebody signs."""

    def __init__(self, place: FilePlace, sums: FileSum, signer: Signer | None = None) -> None:
        """signer: who signed the sums. Raises DamageError when the file is missing or has another
        size."""
        assert signer is None or sums.macs is not None
        check_size(place.where, sums.bytes, place.size())
        super().__init__(sums.bytes, place.where)
        self._place, self._sums, self._signer = place, sums, signer
        self._cache: dict[int, bytes] = {}

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
            data = _bytes_of(self._place.fs, self._place.path, where, start, end)
        expected, found = self._sums.xxh3_64[index], xxhash.xxh3_64_hexdigest(data)
        if found != expected:
            raise DamageError(
                f"{where}: block {index} (bytes {start} to {end}): expected xxh3_64 "
                f"{expected}, found {found} over {len(data)} bytes"
            )
        self._check_mac(index, data)
        return data

    def _check_mac(self, index: int, data: bytes) -> None:
        if self._signer is None:
            return
        assert self._sums.macs is not None
        mac = self._signer.block()
        mac.update(data)
        if not hmac.compare_digest(mac.letters().encode(), self._sums.macs[index].encode()):
            raise DamageError(
                f"{self._place.where}: block {index}: expected the bytes that were signed with "
                "this job's secret, found others under the same xxh3_64: forged"
            )

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


def read_whole(fs: Any, path: str, where: str) -> bytes | None:
    """A small file's bytes; None when there is none. Raises OSError, and DamageError for what would
    be waited for in vain (a directory, a pipe) or would fill the memory."""
    try:
        return _bytes_of(fs, path, where)
    except FileNotFoundError:
        check_is_not_behind_a_link(fs, path)
        return None


def _bytes_of(
    fs: Any, path: str, where: str, start: int | None = None, end: int | None = None
) -> bytes:
    """As many as the file had when it was opened: who may write to the store may change it, or what
    stands in its place, at any time. Raises OSError, and DamageError as `read_whole`."""
    if not isinstance(fs, LocalFileSystem):
        raw: bytes = fs.cat_file(path, start=start, end=end)
        return raw
    # Links are followed, since a part of a store may lie on another disk. What they lead to is not
    # opened before it is known for a file: a pipe has a writer to wait for, a device may act.
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        facts = os.fstat(found)
        if not stat.S_ISREG(facts.st_mode):
            kind = "a directory" if stat.S_ISDIR(facts.st_mode) else "a pipe or a device"
            raise DamageError(f"{where}: expected a file, found {kind}")
        start, end = start or 0, facts.st_size if end is None else min(end, facts.st_size)
        if end - start > MOST_SMALL_BYTES:
            raise DamageError(
                f"{where}: expected at most {human_bytes(MOST_SMALL_BYTES)}, found "
                f"{human_bytes(end - start)}"
            )
        fd = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(found)
    with open(fd, "rb") as file:
        file.seek(start)
        return file.read(max(0, end - start))


def is_there(fs: Any, path: str) -> bool:
    """Raises OSError when that cannot be seen."""
    try:
        fs.info(path)
    except (FileNotFoundError, NotADirectoryError):
        check_is_not_behind_a_link(fs, path)
        return False
    return True


def check_is_not_behind_a_link(fs: Any, path: str) -> None:
    """Of what was not found. Raises OSError where a link on the way leads nowhere: what it leads to
    may be a disk that is not mounted now, and that is not the same as nothing."""
    if isinstance(fs, LocalFileSystem):
        for each in (Path(path), *Path(path).parents):
            if each.is_symlink() and not each.exists():
                raise OSError(
                    errno.ENXIO, "expected what the link leads to, found nothing", str(each)
                )


def check_is_a_directory(fs: Any, path: str) -> None:
    """Of what could not be looked into. Raises DamageError where that is sure to be no directory,
    whatever is mounted or allowed later. On an object store nothing stands in a directory's way."""
    if not isinstance(fs, LocalFileSystem):
        return
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise DamageError(f"{path}: expected a directory, found something else")
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            told = f"{path}: expected a directory, found a link that leads in a circle"
            raise DamageError(told) from error


def is_closed(error: BaseException) -> bool:
    """Whether a look failed for what it was at, not for the store: another user's, or behind a link
    to what is not there now."""
    cause = error.__cause__
    return isinstance(cause, OSError) and (
        isinstance(cause, PermissionError) or cause.errno == errno.ENXIO
    )


def put_whole(fs: Any, path: str, raw: bytes, replaces: bool = False) -> None:
    """A file of these bytes, whole or not at all, wherever its writer ends; in place of none unless
    it `replaces` one. Raises FileExistsError."""
    try:
        if isinstance(fs, LocalFileSystem):
            _put_on_disk(path, raw, replaces)
        else:
            fs.pipe_file(path, raw, mode="overwrite" if replaces else "create")
    except FileExistsError:
        # an answer may be lost, and the library asks again
        if not is_what_is_there(fs, path, raw):
            raise


def is_what_is_there(fs: Any, path: str, raw: bytes) -> bool:
    """Whether a small file has just these bytes. Raises OSError."""
    try:
        return read_whole(fs, path, path) == raw
    except DamageError:
        return False


def _put_on_disk(path: str, raw: bytes, replaces: bool) -> None:
    aside = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with open(aside, "xb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            os.replace(aside, path)
        else:
            rename_new(aside, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)


def rename_new(source: str, path: str) -> None:
    """Let a local file have another name, that of no other. Raises FileExistsError."""
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "File exists", path) from error
        os.rename(source, path)
    else:
        os.unlink(source)


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
        told = on_a_screen(f"{type(error).__name__}: {error}")  # the server's words may be in it
        raise StoreError(f"{doing}: expected it to succeed, found {told}{room}") from error


# Filesystems turn most of what a service answers into OSError, and let these of their libraries
# through: no endpoint, no credentials, an answer that ends in the middle.
_OF_LIBRARIES = (
    ("asyncio", ("TimeoutError",)),  # no OSError before Python 3.11
    ("botocore.exceptions", ("BotoCoreError", "ClientError")),
    ("aiohttp", ("ClientError",)),
    ("google.auth.exceptions", ("GoogleAuthError",)),
    ("azure.core.exceptions", ("AzureError",)),
)


def _trouble() -> tuple[type[BaseException], ...]:
    found: list[type[BaseException]] = [OSError]
    for module, names in _OF_LIBRARIES:
        if module in sys.modules:
            found += [getattr(sys.modules[module], name) for name in names]
    return tuple(found)
