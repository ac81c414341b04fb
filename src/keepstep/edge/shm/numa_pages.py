"""NUMA pages: has a new file of a tmpfs take its pages from one node, as far as that has some.

The wish belongs to the file and not to the map: whoever touches a page first, on whatever thread,
also after it was given up, gets it there. It is none but a wish (MPOL_PREFERRED): where the node is
full, others give.

Comes in: a file that is new and empty, a node. Goes out: the kernel's `mbind`, called by its
number, because only libnuma has a name for it. Where that is refused (a container without the call,
a node that the process may not use) the file is as it would have been.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

MBIND = {"x86_64": 237, "aarch64": 235}
MPOL_PREFERRED = 1
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def prefer_node(fd: int, nbytes: int, node: int) -> bool:
    """Whether it is heard. Raises OSError when the file may not be so long."""
    number = MBIND.get(platform.machine())
    if number is None or nbytes < mmap.PAGESIZE or os.fstat(fd).st_blocks:
        return False  # what it has already stays where it is
    os.ftruncate(fd, nbytes)
    with mmap.mmap(fd, nbytes) as pages:
        anchor = ctypes.c_char.from_buffer(pages)
        words = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
        words[node // _WORD_BITS] = 1 << node % _WORD_BITS
        code = _libc.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(ctypes.addressof(anchor)),
            ctypes.c_ulong(nbytes),
            ctypes.c_int(MPOL_PREFERRED),
            ctypes.byref(words),
            ctypes.c_ulong(_WORD_BITS * len(words) + 1),  # the kernel takes one for itself
            ctypes.c_uint(0),
        )
        del anchor
    return int(code) == 0
