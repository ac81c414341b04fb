"""Memory: maps of files in tmpfs, pre-faulted, and copies between addresses without the GIL.

Not `multiprocessing.shared_memory`: its resource tracker unlinks the segment when a process dies
(CPython before 3.13), which is the very moment the bytes are for. ctypes releases the GIL around
every foreign call; glibc's memcpy streams past the cache where that is faster, which torch's
`copy_` does not (half the speed).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from keepstep.coding.checksum import BLOCK_BYTES
from keepstep.errors import MemoryBudgetError
from keepstep.model.units import KIB, human_bytes, round_up

_MADV_POPULATE_WRITE = 23  # Linux 5.14

SMALL_BYTES = 64 * KIB  # a few microseconds

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None)
for _library in (_libc, _libc_with_gil):
    _library.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _library.memcpy.restype = ctypes.c_void_p
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def copy(destination: int, source: int, nbytes: int) -> None:
    """memcpy between addresses, GIL released. The caller keeps both ends alive."""
    _libc.memcpy(destination, source, nbytes)


def copy_to_fresh(destination: int, source: int, nbytes: int) -> None:
    """`copy` into private memory that nobody has touched. The kernel is asked for all whole pages
    at once: one after the other, as the copy touches them, they take longer than the copy. Where it
    does not give them so (an older kernel), the copy does touch them."""
    first = round_up(destination, mmap.PAGESIZE)
    pages_bytes = (destination + nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if pages_bytes > 0:
        _libc.madvise(first, pages_bytes, _MADV_POPULATE_WRITE)
    copy(destination, source, nbytes)


def copy_all(copies: Iterable[tuple[int, int, int]]) -> None:
    """memcpy for each (destination, source, nbytes). Small ones keep the GIL: getting it back takes
    longer than they do."""
    large, small = _libc.memcpy, _libc_with_gil.memcpy
    for destination, source, nbytes in copies:
        (small if nbytes < SMALL_BYTES else large)(destination, source, nbytes)


def equal(left: int, right: int, nbytes: int) -> bool:
    """memcmp between addresses, GIL released."""
    return bool(_libc.memcmp(left, right, nbytes) == 0)


# How opening says that there is something, and that it is no file.
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO)


def open_file(path: Path, flags: int = 0) -> int:
    """A descriptor for reading and writing. Never waits, as opening a fifo may, and follows no
    link. Raises OSError, ValueError when what lies there is no file."""
    always = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, always | flags, 0o600)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise ValueError(f"{path}: expected a file, found something else ({error})") from error
    kind = os.fstat(fd).st_mode
    if not stat.S_ISREG(kind):
        os.close(fd)
        raise ValueError(f"{path}: expected a file, found {stat.filemode(kind)}")
    return fd


class MappedFile:
    """A whole file mapped read-write and shared. `address` is valid until `close`."""

    def __init__(self, path: Path) -> None:
        """Map an existing file. Raises OSError, ValueError when it is empty or no file."""
        self.path = path
        self.fd = open_file(path)
        try:
            facts = os.fstat(self.fd)
            self.nbytes, self._identity = facts.st_size, (facts.st_dev, facts.st_ino)
            self._map = mmap.mmap(self.fd, self.nbytes)
        except (OSError, ValueError):
            os.close(self.fd)
            raise
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.view = memoryview(self._map)

    def prefault(self) -> None:
        """Map every page now: a first touch later costs twenty times the copy."""
        if _libc.madvise(self.address, self.nbytes, _MADV_POPULATE_WRITE) != 0:
            for at in range(0, self.nbytes, mmap.PAGESIZE):  # an older kernel
                self._map[at] = self._map[at]

    def lock(self, exclusive: bool) -> bool:
        """Try to take the file's flock for this open file; False when others hold it."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def put(self, at: int, data: bytes) -> None:
        self.view[at : at + len(data)] = data

    def is_there(self) -> bool:
        """Whether `path` still leads to this file: its number is not given to another one while it
        is mapped."""
        try:
            facts = os.stat(self.path)
        except OSError:
            return False
        return (facts.st_dev, facts.st_ino) == self._identity

    def close(self) -> None:
        """Unmap, and give up every flock: the map holds a descriptor of its own (mmap duplicates
        it).

        A map that views or tensors still look at stays until they are gone.
        """
        self.view.release()
        self._anchor = None
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)


class SharedMemory:
    """The node's memory as `ports.Memory`: files of a tmpfs."""

    block_bytes = BLOCK_BYTES

    def open(self, path: Path) -> MappedFile:
        return MappedFile(path)

    def create(self, path: Path, nbytes: int) -> MappedFile:
        # who has it mapped keeps what is in it: cutting it short would kill him
        self.remove(path)
        return self.ensure(path, nbytes)

    def ensure(self, path: Path, nbytes: int) -> MappedFile:
        """All pages are reserved, so that writing can never meet a full filesystem (SIGBUS)."""
        _make_private(path.parent)
        try:
            fd = open_file(path, os.O_CREAT)
        except ValueError:  # nobody of ours has put it there
            self.remove(path)
            fd = open_file(path, os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno == errno.EFBIG:
                most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
                limit = "no limit" if most == resource.RLIM_INFINITY else human_bytes(most)
                raise MemoryBudgetError(
                    f"{path}: expected room for a file of {human_bytes(nbytes)}, found that the "
                    f"largest this process may write is smaller (`ulimit -f`: {limit}): raise it, "
                    "`ulimit -f unlimited`"
                ) from error
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            free = human_bytes(self.free_bytes(path.parent))
            raise MemoryBudgetError(
                f"a file of {human_bytes(nbytes)} does not fit into {path.parent}: {free} "
                "are free there"
            ) from error
        finally:
            os.close(fd)
        return MappedFile(path)

    def names(self, directory: Path) -> list[str]:
        # not `Path.glob`: it raises when a directory vanishes while it looks (Python 3.11)
        try:
            return sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []

    def rename(self, path: Path, to: Path) -> None:
        try:
            os.replace(path, to)
        except IsADirectoryError:  # nobody of ours has put it there
            self.remove(to)
            os.replace(path, to)

    def remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            try:
                path.unlink()
            except IsADirectoryError:
                shutil.rmtree(path)

    def size(self, path: Path) -> int:
        try:
            found = path.stat()
        except OSError:
            return 0
        return found.st_size if stat.S_ISREG(found.st_mode) else 0

    def free_bytes(self, directory: Path) -> int:
        facts = os.statvfs(directory)
        return facts.f_bavail * facts.f_frsize


def _make_private(directory: Path) -> None:
    """With all that is missing above it: `mkdir` gives its mode to the last one only."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        _make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


MEMORY = SharedMemory()


def resident_bytes(directory: Path) -> int:
    """What the files below a directory take up, holes not counted. It may be removed meanwhile."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total
