"""Disk: how fast a directory takes bytes that are to stay, and whether it gives them back.

A file without a name of bounded size: nothing is left, whatever ends this process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from keepstep.model.units import MIB, S_NS

BLOCK_BYTES = MIB
SMALL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DiskFigures:
    """`writes`: bytes a second, each with its fsync. `syncs`: ns of a small write and its fsync.
    `wrong_at`: offset of the first block that came back otherwise."""

    writes: tuple[int, ...]
    syncs: tuple[int, ...]
    wrong_at: int | None


def measure_disk(directory: Path, total_bytes: int, samples: int, syncs: int) -> DiskFigures:
    """total_bytes: written in so many parts. Raises OSError."""
    with tempfile.TemporaryFile(dir=directory) as file:
        fd = file.fileno()
        blocks = max(1, total_bytes // samples // BLOCK_BYTES)
        writes, small = [], []
        for sample in range(samples):
            begun_ns = time.perf_counter_ns()
            for index in range(sample * blocks, (sample + 1) * blocks):
                _write(fd, block(index), index * BLOCK_BYTES)
            os.fsync(fd)
            took_ns = max(1, time.perf_counter_ns() - begun_ns)
            writes.append(blocks * BLOCK_BYTES * S_NS // took_ns)
        wrong_at = _compare(fd, samples * blocks)
        for turn in range(syncs):
            begun_ns = time.perf_counter_ns()
            _write(fd, block(turn)[:SMALL_BYTES], 0)
            os.fsync(fd)
            small.append(max(1, time.perf_counter_ns() - begun_ns))
        return DiskFigures(tuple(writes), tuple(small), wrong_at)


def block(index: int) -> bytes:
    """What stands in that block: random, so that no disk compresses it, and unlike every other."""
    stamp = index.to_bytes(8, "little")
    return stamp + _RANDOM[len(stamp) + index % 1024 :][: BLOCK_BYTES - len(stamp)]


_RANDOM = hashlib.shake_128(b"keepstep-disk").digest(BLOCK_BYTES + 1024)


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        if done == 0:
            raise OSError(errno.EIO, "nothing was written")
        at, view = at + done, view[done:]


def _compare(fd: int, blocks: int) -> int | None:
    """From the disk, not from the kernel's copy in memory, where it lets go of that."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    for index in range(blocks):
        if os.pread(fd, BLOCK_BYTES, index * BLOCK_BYTES) != block(index):
            return index * BLOCK_BYTES
    return None
