"""Status page: what a rank publishes about itself in one page of shared memory.

Two halves, written in turn, each with a sequence number under its checksum: a reader takes the newest whole one, so a write under
way, a torn read or a writer killed in mid-write costs at most one update. The rank holds an exclusive flock on the file
while it lives, so "is it alive" is a question to the kernel, not to a timeout.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepstep.coding.checksum import checksum
from keepstep.edge.arena import rank_dir
from keepstep.edge.memory import Region
from keepstep.model.snapshot import Phase, RankStatus, SlotState, SlotView, Stamp
from keepstep.model.units import PAGE_BYTES

MAX_SLOTS = 8
_FIXED = struct.Struct("<IIQQQI4x3q3Q6Q Qd I4x".replace(" ", ""))
_SLOT = struct.Struct("<I4xqQ")
_HEAD = struct.Struct("<QI4x")  # checksum and bytes of what follows: the sequence and the fields
_SEQUENCE = struct.Struct("<Q")
HALF_BYTES = PAGE_BYTES // 2

BLANK = RankStatus(0, 0, 0, 0, 0, Phase.STARTING, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, math.nan, ())


def status_path(job_dir: Path, rank: int) -> Path:
    return rank_dir(job_dir, rank) / "status"


class StatusPage:
    """One rank's page, mapped. The owner calls `publish`; anyone may `read`."""

    def __init__(self, path: Path) -> None:
        """Map an existing page. Raises OSError or ValueError when there is none."""
        self._region = Region(path)
        self._lock = threading.Lock()
        self._current = BLANK
        if self._region.nbytes != PAGE_BYTES:
            self._region.close()
            raise ValueError(f"{path}: expected a status page of {PAGE_BYTES} bytes, found {self._region.nbytes}")

    @classmethod
    def own(cls, job_dir: Path, rank: int, patience_s: float = 2.0) -> StatusPage | None:
        """Map the rank's page as its owner, creating it if needed; None when a living process owns it.

        A killed owner takes a moment to be gone, and an onlooker's `alive` holds the lock for a moment too.
        """
        path = status_path(job_dir, rank)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(fd, 0, PAGE_BYTES)
        os.close(fd)
        page = cls(path)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(page._region.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return page
            except BlockingIOError:
                if time.monotonic() > deadline:
                    page.close()
                    return None
                time.sleep(0.01)

    def alive(self) -> bool:
        """Whether a living process owns the page."""
        try:
            fcntl.flock(self._region.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._region.fd, fcntl.LOCK_UN)
        return False

    def publish(self, **changes: Any) -> RankStatus:
        """Change some fields and write them into the half that does not hold the newest."""
        with self._lock:
            self._current = replace(self._current, updated_mono_ns=time.monotonic_ns(), **changes)
            sequence = max((s for s, _ in self._halves()), default=0) + 1
            body = _SEQUENCE.pack(sequence) + _pack(self._current)
            at = HALF_BYTES * (sequence % 2)
            self._region.view[at + _HEAD.size : at + _HEAD.size + len(body)] = body
            _HEAD.pack_into(self._region.view, at, checksum(body), len(body))
            return self._current

    def read(self) -> RankStatus | None:
        """The newest whole page; None when none was ever written. A writer killed in mid-write leaves the one before."""
        for _ in range(100):  # again only when the writer came round twice meanwhile
            halves = self._halves()
            if halves:
                return _unpack(max(halves)[1])
        return None

    def _halves(self) -> list[tuple[int, bytes]]:
        """(sequence, body) of each half that is whole."""
        whole = []
        for at in (0, HALF_BYTES):
            want, size = _HEAD.unpack_from(self._region.view, at)
            body = bytes(self._region.view[at + _HEAD.size : at + _HEAD.size + min(size, HALF_BYTES - _HEAD.size)])
            if size and checksum(body) == want:
                whole.append((_SEQUENCE.unpack_from(body)[0], body[_SEQUENCE.size :]))
        return whole

    def close(self) -> None:
        self._region.close()


def read_status(job_dir: Path, rank: int) -> RankStatus | None:
    """What a rank says now, for who looks once; None when there is nothing whole to read."""
    try:
        page = StatusPage(status_path(job_dir, rank))
    except (OSError, ValueError):
        return None
    try:
        return page.read()
    finally:
        page.close()


def _pack(s: RankStatus) -> bytes:
    fixed = _FIXED.pack(
        *(s.rank, s.world_size, s.pid, s.incarnation, s.epoch, s.phase, s.step, s.completed_step, s.decided_step),
        *(s.captured_steps, s.skipped_steps, s.torn_steps, s.stall_ns_total, s.stall_ns_last, s.step_ns_last),
        *(s.copy_ns_last, s.seal_ns_last, s.payload_bytes, s.updated_mono_ns, s.loss, len(s.slots)),
    )
    return fixed + b"".join(_SLOT.pack(v.state, v.stamp.step, v.stamp.epoch) for v in s.slots)


def _unpack(body: bytes) -> RankStatus:
    *fields, count = _FIXED.unpack_from(body)
    slots = []
    for i in range(count):
        state, step, epoch = _SLOT.unpack_from(body, _FIXED.size + i * _SLOT.size)
        slots.append(SlotView(SlotState(state), Stamp(step, epoch)))
    fields[5] = Phase(fields[5])
    values: list[Any] = [*fields, tuple(slots)]
    return RankStatus(*values)
