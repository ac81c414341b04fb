"""Place: bytes written into a directory, forced out, and read back from where they went.

The file has no name where the file system allows that, else it is unlinked at once: a probe that is
killed leaves nothing behind. The bytes are new each time.

Canary: what was written must pass for itself, and with one bit flipped it must not, in the very
comparison that judges what was read.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from keepstep.edge.doctor.host import Host
from keepstep.edge.parts.probe import PartLook, Targets
from keepstep.model.parts import PlaceReading
from keepstep.model.units import KIB, MIB

DISK_BYTES = MIB
SHM_BYTES = 64 * KIB


def probe_disk(host: Host, targets: Targets, cursor: int) -> PartLook:
    """See `Probe`."""
    return _look(targets.disk_dir, DISK_BYTES)


def probe_shm(host: Host, targets: Targets, cursor: int) -> PartLook:
    """See `Probe`."""
    return _look(targets.arena_dir, SHM_BYTES)


def _look(directory: Path, nbytes: int) -> PartLook:
    written = os.urandom(4 * KIB) * (nbytes // (4 * KIB))
    began_ns = time.monotonic_ns()
    refusal, found = "", b""
    try:
        found = _there_and_back(directory, written)
    except OSError as error:
        refusal = error.strerror or str(error)
    took_ns = time.monotonic_ns() - began_ns
    if is_as_written(_flipped(written), written):
        return PartLook(blind="a flipped bit was not seen")
    if not is_as_written(bytes(bytearray(written)), written):
        return PartLook(blind="bytes were not found to be like themselves")
    free, total = _space(directory)
    is_same = bool(refusal) or is_as_written(found, written)
    return PartLook((PlaceReading(str(directory), took_ns, refusal, is_same, free, total),))


def is_as_written(found: bytes, written: bytes) -> bool:
    """Whether a place gave back what it was given."""
    return found == written


def _flipped(data: bytes) -> bytes:
    """With one bit different, somewhere in it."""
    damaged = bytearray(data)
    damaged[int.from_bytes(os.urandom(4), "little") % len(damaged)] ^= 1
    return bytes(damaged)


def _there_and_back(directory: Path, data: bytes) -> bytes:
    fd = _open(directory)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
        with contextlib.suppress(OSError):  # else it is read out of the page cache
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        pieces, at = [], 0
        while piece := os.pread(fd, len(data) - at, at):
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def _open(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # NFS, say, has no files without a name
        path = directory / f".keepstep-probe-{os.getpid()}"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.unlink(path)
        return fd


def _space(directory: Path) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(directory)
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
