"""The first touch of a file's pages: by several threads, and as huge pages where a tmpfs gives them
to who asks (`huge=advise`).

`fallocate` reserves pages one after the other, in one thread, and the first touch clears them: some
2 GB/s together. It knows of no map that could have asked either, so what it reserves are small
pages for good. A map that is populated does both at once, and several threads do it side by side.

Comes in: a file of a tmpfs that is new and empty. Goes out: its pages, as far as there is room;
whoever reserves the file afterwards finds out what is missing. On other filesystems nothing
happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from keepstep.model.units import MIB, round_up

HUGE_BYTES = 2 * MIB  # x86-64, and arm64 with pages of 4 KiB
MUCH_BYTES = 256 * MIB  # worth threads
ENOUGH_THREADS = 4  # fewer win nothing: the map that is kept is populated once more
MADV_POPULATE_WRITE = 23  # Linux 5.14
MOUNTS = Path("/proc/self/mounts")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populate(address: int, nbytes: int, threads: int) -> bool:
    """Touch whole pages of a map, its GIL released. False where the kernel does not do it: it is
    older, or there is no room."""
    part = max(round_up(-(-nbytes // threads), HUGE_BYTES), HUGE_BYTES)

    def one(at: int) -> bool:
        count = min(part, nbytes - at)
        return bool(_libc.madvise(address + at, count, MADV_POPULATE_WRITE) == 0)

    if part >= nbytes:
        return one(0)
    with ThreadPoolExecutor(threads, thread_name_prefix="first-touch") as pool:
        return all(pool.map(one, range(0, nbytes, part)))


def touch_first(fd: int, path: Path, nbytes: int, threads: int, mounts: Path = MOUNTS) -> None:
    """Of a new file, before it is reserved. Not by writing: where there is no room that ends the
    process (SIGBUS), and this is over. Raises OSError when the file may not be so long."""
    options = _tmpfs_options(path.parent, mounts)
    asks = "huge=advise" in options and nbytes >= HUGE_BYTES
    if not asks and (not options or threads < ENOUGH_THREADS or nbytes < MUCH_BYTES):
        return
    if os.fstat(fd).st_blocks:
        return  # it has its pages
    os.ftruncate(fd, nbytes)
    with mmap.mmap(fd, nbytes) as pages:
        anchor = ctypes.c_char.from_buffer(pages)
        if asks:
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        populate(ctypes.addressof(anchor), nbytes, threads)
        del anchor


@lru_cache(maxsize=64)
def _tmpfs_options(directory: Path, mounts: Path) -> tuple[str, ...]:
    """Of the tmpfs that the directory lies in; none where it lies in something else."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ()
    found: tuple[str, ...] = ()
    longest = -1
    for line in lines:
        fields = line.split()
        place = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[1]))
        # of two mounts at one place the later one is what is seen
        if directory.is_relative_to(place) and len(place.parts) >= longest:
            longest = len(place.parts)
            found = tuple(fields[3].split(",")) if fields[2] == "tmpfs" else ()
    return found
