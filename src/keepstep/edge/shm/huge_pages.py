"""Huge pages: has a tmpfs that gives them to who asks (`huge=advise`) give them to a new file.

`fallocate` knows of no map that could have asked, so what it reserves are small pages for good.
Comes in: a file that is new and empty. Goes out: its pages, as large as the filesystem gives them,
as far as there is room; whoever reserves the file afterwards finds out what is missing. Elsewhere
(`huge=never`, the default; `within_size`, `always`, where nobody has to ask) nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
from functools import lru_cache
from pathlib import Path

from keepstep.model.units import MIB

HUGE_BYTES = 2 * MIB  # x86-64, and arm64 with pages of 4 KiB
MADV_POPULATE_WRITE = 23  # Linux 5.14
MOUNTS = Path("/proc/self/mounts")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def take_huge_pages(fd: int, path: Path, nbytes: int, mounts: Path = MOUNTS) -> None:
    """Touch the pages of a file for the first time through a map that asks for huge ones. Raises
    OSError when the file may not be so long."""
    if nbytes < HUGE_BYTES or not _gives_to_who_asks(path.parent, mounts):
        return
    if os.fstat(fd).st_blocks:
        return  # it has its pages
    os.ftruncate(fd, nbytes)
    with mmap.mmap(fd, nbytes) as pages:
        anchor = ctypes.c_char.from_buffer(pages)
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        # Not by writing: where there is no room that ends the process (SIGBUS), and this fails.
        _libc.madvise(ctypes.addressof(anchor), nbytes, MADV_POPULATE_WRITE)
        del anchor


@lru_cache(maxsize=64)
def _gives_to_who_asks(directory: Path, mounts: Path) -> bool:
    """Whether that directory's filesystem is a tmpfs mounted with `huge=advise`."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    found = ""
    longest = -1
    for line in lines:
        fields = line.split()
        place = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[1]))
        # of two mounts at one place the later one is what is seen
        if directory.is_relative_to(place) and len(place.parts) >= longest:
            longest = len(place.parts)
            found = fields[3] if fields[2] == "tmpfs" else ""
    return "huge=advise" in found.split(",")
