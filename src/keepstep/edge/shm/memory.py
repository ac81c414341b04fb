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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from keepstep.coding.checksum import BLOCK_BYTES
from keepstep.edge.os.machine import proof_threads
from keepstep.edge.shm.huge_pages import MADV_POPULATE_WRITE, take_huge_pages
from keepstep.edge.shm.numa_pages import prefer_node
from keepstep.errors import MemoryBudgetError
from keepstep.model.units import KIB, MIB, human_bytes, round_up
from keepstep.ports import Region

_MADV_REMOVE = 9
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value

SMALL_BYTES = 64 * KIB  # a few microseconds
MUCH_BYTES = 256 * MIB  # worth threads

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None)
for _library in (_libc, _libc_with_gil):
    _library.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _library.memcpy.restype = ctypes.c_void_p
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.pwritev.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_libc.pwritev.restype = ctypes.c_ssize_t
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
_libc.memset.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p

MOST_RANGES = 1024  # that one call takes (UIO_MAXIOV)


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
        _libc.madvise(first, pages_bytes, MADV_POPULATE_WRITE)
    copy(destination, source, nbytes)


def copy_all(copies: Iterable[tuple[int, int, int]]) -> None:
    """memcpy for each (destination, source, nbytes). Small ones keep the GIL: getting it back takes
    longer than they do."""
    large, small = _libc.memcpy, _libc_with_gil.memcpy
    for destination, source, nbytes in copies:
        (small if nbytes < SMALL_BYTES else large)(destination, source, nbytes)


class Ranges:
    """Places in memory, (address, nbytes), as the system takes them. Whoever makes one keeps them
    alive."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        assert 0 < len(ranges) <= MOST_RANGES, len(ranges)
        self.count = len(ranges)
        self.nbytes = sum(nbytes for _, nbytes in ranges)
        flat = list(chain.from_iterable(ranges))
        self._vector = (ctypes.c_size_t * len(flat))(*flat)  # struct iovec: address and size
        self.address = ctypes.addressof(self._vector)


def equal(left: int, right: int, nbytes: int) -> bool:
    """memcmp between addresses, GIL released."""
    return bool(_libc.memcmp(left, right, nbytes) == 0)


# What there may be none of: pages or files of a tmpfs, a user's quota, memory or maps, descriptors.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
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


class _OpenFile:
    """A descriptor, closed when nobody uses it any more: its number may be another file's then."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)


class MappedFile:
    """A whole file mapped read-write and shared. `address` is valid until `close`."""

    def __init__(self, path: Path) -> None:
        """Map an existing file. Raises OSError, ValueError when it is empty or no file."""
        self.path = path
        self._file: _OpenFile | None = _OpenFile(open_file(path))
        facts = os.fstat(self.fd)
        self.nbytes, self._identity = facts.st_size, (facts.st_dev, facts.st_ino)
        self._map = mmap.mmap(self.fd, self.nbytes)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.view = memoryview(self._map)

    @property
    def fd(self) -> int:
        """-1 when it is closed."""
        return -1 if self._file is None else self._file.number

    def prefault(self, at: int = 0, nbytes: int | None = None) -> None:
        """Map every page now: a first touch later costs twenty times the copy. Much of it by
        several threads: one clears some 3 GB/s, and who starts a training waits."""
        end = self.nbytes if nbytes is None else at + nbytes
        at -= at % mmap.PAGESIZE
        threads = proof_threads() if end - at > MUCH_BYTES else 1
        if threads == 1:
            self._populate(at, end)
            return
        part = round_up(-(-(end - at) // threads), mmap.PAGESIZE)
        begins = range(at, end, part)
        ends = [min(begin + part, end) for begin in begins]
        with ThreadPoolExecutor(threads, thread_name_prefix="prefault") as pool:
            list(pool.map(self._populate, begins, ends))

    def _populate(self, begin: int, end: int) -> None:
        if begin < end and (
            _libc.madvise(self.address + begin, end - begin, MADV_POPULATE_WRITE) != 0
        ):
            for touched in range(begin, end, mmap.PAGESIZE):  # an older kernel
                self._map[touched] = self._map[touched]

    def punch(self, at: int, nbytes: int) -> None:
        first, end = round_up(at, mmap.PAGESIZE), (at + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= end:
            self.view[at : at + nbytes] = bytes(nbytes)
            return
        self.view[at:first] = bytes(first - at)
        self.view[end : at + nbytes] = bytes(at + nbytes - end)
        if _libc.madvise(self.address + first, end - first, _MADV_REMOVE) != 0:
            # A filesystem that gives nothing back, as no tmpfs is.
            _libc.memset(self.address + first, 0, end - first)

    def has_holes(self) -> bool:
        facts = os.fstat(self.fd)
        return facts.st_blocks * 512 < facts.st_size

    def lock(self, exclusive: bool) -> bool:
        """Try to take the file's flock for this open file; False when others hold it, or the kernel
        has no memory for one more."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOLCK):
                return False
            raise
        return True

    def unlock(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        except OSError as error:  # then it is held until the file is closed, and others do without
            if error.errno != errno.ENOLCK:
                raise

    def put(self, at: int, data: bytes) -> None:
        self.view[at : at + len(data)] = data

    def gather(self, at: int, ranges: int, count: int) -> int:
        """`Region.gather`: the pages that are written are those of the map. GIL released."""
        file = self._file  # held meanwhile, whoever closes it
        written = _libc.pwritev(-1 if file is None else file.number, ranges, count, at)
        if written < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(self.path))
        return int(written)

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
        self._file = None


class JoinedFiles:
    """Stretches of mapped files, one behind the other, as `ports.Region` to read from."""

    def __init__(self, pieces: Sequence[tuple[MappedFile, int, int]]) -> None:
        """Raises OSError."""
        self.path = pieces[0][0].path
        self.is_there = pieces[0][0].is_there
        self.nbytes = sum(nbytes for _, _, nbytes in pieces)
        # A map of Python's own lends its addresses: it knows who still looks into it.
        self._map = mmap.mmap(-1, self.nbytes)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.view = memoryview(self._map)
        at = self.address
        for region, offset, nbytes in pieces:
            flags, access = mmap.MAP_SHARED | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
            if _libc.mmap(at, nbytes, access, flags, region.fd, offset) == _MAP_FAILED:
                error = OSError(ctypes.get_errno(), f"{region.path}: cannot be mapped")
                self.close()
                raise error
            at += nbytes

    def prefault(self, at: int = 0, nbytes: int | None = None) -> None:
        """It is read once."""

    def punch(self, at: int, nbytes: int) -> None:
        raise AssertionError("several files' memory is not given up by whoever reads it")

    def has_holes(self) -> bool:
        return False

    def lock(self, exclusive: bool) -> bool:
        raise AssertionError("several files are locked one by one")

    def unlock(self) -> None:
        """It has no lock."""

    def put(self, at: int, data: bytes) -> None:
        raise AssertionError("several files are only read")

    def gather(self, at: int, ranges: int, count: int) -> int:
        raise AssertionError("several files are only read")

    def close(self) -> None:
        """See `MappedFile`."""
        self.view.release()
        self._anchor = None
        with contextlib.suppress(BufferError):
            self._map.close()


class SharedMemory:
    """The node's memory as `ports.Memory`: files of a tmpfs."""

    block_bytes = BLOCK_BYTES

    def __init__(self, numa_node: int | None = None) -> None:
        """`numa_node`: from which new files get their pages, where it has some left."""
        self._numa_node = numa_node

    def open(self, path: Path) -> MappedFile:
        return MappedFile(path)

    def create(self, path: Path, nbytes: int) -> MappedFile:
        # who has it mapped keeps what is in it: cutting it short would kill him
        self.remove(path)
        try:
            return self.ensure(path, nbytes)
        except MemoryBudgetError:
            self.remove(path)
            raise

    def ensure(self, path: Path, nbytes: int) -> MappedFile:
        """All pages are reserved, so that writing can never meet a full filesystem (SIGBUS)."""
        try:
            _make_private(path.parent)
            fd = self._opened(path)
            try:
                self._reserve(fd, path, nbytes)
            finally:
                os.close(fd)
            return MappedFile(path)
        except OSError as error:
            if error.errno == errno.EFBIG:
                most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
                limit = "no limit" if most == resource.RLIM_INFINITY else human_bytes(most)
                raise MemoryBudgetError(
                    f"{path}: expected room for a file of {human_bytes(nbytes)}, found that the "
                    f"largest this process may write is smaller (`ulimit -f`: {limit}): raise it, "
                    "`ulimit -f unlimited`"
                ) from error
            if error.errno not in _NO_ROOM:
                raise
            raise MemoryBudgetError(
                f"a file of {human_bytes(nbytes)} does not fit into {path.parent}: "
                f"{self._free_above(path)} are free there ({error.strerror})"
            ) from error

    def _opened(self, path: Path) -> int:
        try:
            return open_file(path, os.O_CREAT)
        except ValueError:  # nobody of ours has put it there
            self.remove(path)
            return open_file(path, os.O_CREAT)

    def _reserve(self, fd: int, path: Path, nbytes: int) -> None:
        """Raises OSError, and leaves nothing there then."""
        try:
            if self._numa_node is not None:
                prefer_node(fd, nbytes, self._numa_node)
            take_huge_pages(fd, path.resolve(), nbytes)
            os.posix_fallocate(fd, 0, nbytes)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _free_above(self, path: Path) -> str:
        """In words, whichever of the directories above it are there."""
        return human_bytes(self.free_bytes(next(above for above in path.parents if above.is_dir())))

    def join(self, pieces: Sequence[tuple[Region, int, int]]) -> JoinedFiles:
        mapped = []
        for region, at, nbytes in pieces:
            assert isinstance(region, MappedFile) and at % mmap.PAGESIZE == 0
            mapped.append((region, at, nbytes))
        assert all(nbytes % mmap.PAGESIZE == 0 for _, _, nbytes in mapped[:-1])
        return JoinedFiles(mapped)

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
        return min(found.st_size, found.st_blocks * 512) if stat.S_ISREG(found.st_mode) else 0

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
