"""Status page: what a rank publishes about itself in one page of shared memory.

A double-buffered page, so a reader never meets half of a write. The rank holds an exclusive flock
on the file while it lives, so "is it alive" is a question to the kernel, not to a timeout.
"""

from __future__ import annotations

import math
import struct
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from keepstep.edge.os.clock import CLOCK
from keepstep.edge.shm.double_buffered_page import DoubleBufferedPage
from keepstep.edge.shm.slot import rank_dir, ranks_in
from keepstep.model.shares import Share
from keepstep.model.snapshot import Phase, RankStatus, SlotState, SlotView, Stamp
from keepstep.ports import Clock, Memory

MAX_SLOTS = 8
_FIXED = struct.Struct("<IIQQQI4x3q3Q6Q QdQ II QQQ".replace(" ", ""))
_SLOT = struct.Struct("<IiqQQQ")
# by their numbers: several times as fast as asking the enum
_PHASES, _STATES = tuple(Phase), tuple(SlotState)

BLANK = RankStatus(
    0, 0, 0, 0, 0, Phase.STARTING, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, math.nan, ()
)
_INDEX = {name: index for index, name in enumerate(RankStatus._fields)}
_UPDATED, _SLOTS, _COLLECTIVE, _SPAN, _PLAN, _KEPT, _GROUP = (
    _INDEX[name]
    for name in (
        *("updated_mono_ns", "slots", "collective", "span_steps"),
        *("share_plan", "kept_bytes", "replica_group"),
    )
)
_UNSHARED = -1  # in the place of `Share.ranks`


@lru_cache(maxsize=1 << 14)
def status_path(job_dir: Path, rank: int) -> Path:
    return rank_dir(job_dir, rank) / "status"


class StatusPage:
    """One rank's page, mapped. The owner calls `publish`; anyone may `read`."""

    def __init__(self, memory: Memory, path: Path, clock: Clock = CLOCK) -> None:
        """Map an existing page. Raises OSError or ValueError when there is none."""
        self._page = DoubleBufferedPage.open(memory, path)
        self.is_there = self._page.is_there
        self._clock = clock
        self._lock = threading.Lock()
        self._values: list[Any] = list(BLANK)  # as they were written last; changed in place
        # the slots that were written last, as they are written: they change twice a step
        self._packed: tuple[tuple[SlotView, ...], bytes] = (), b""
        # the body that was read last, and what it says
        self._read: tuple[bytes, RankStatus] | None = None

    @classmethod
    def own(
        cls, memory: Memory, job_dir: Path, rank: int, clock: Clock = CLOCK
    ) -> StatusPage | None:
        """Map the rank's page as its owner, creating it if needed; None when it is owned now.

        By a living process; by a killed one, which takes a moment to be gone; or by an onlooker's
        `alive`, which holds the lock for a moment. None, too, when somebody has removed it
        meanwhile.
        """
        path = status_path(job_dir, rank)
        DoubleBufferedPage.ensure(memory, path).close()
        page = cls(memory, path, clock)
        if page._page.lock(exclusive=True) and page.is_there():
            return page
        page.close()
        return None

    def alive(self) -> bool:
        """Whether a living process owns the page."""
        if not self._page.lock(exclusive=False):
            return True
        self._page.unlock()
        return False

    def publish(self, **changes: Any) -> RankStatus:
        """Change some fields and write them."""
        with self._lock:
            values = self._values
            values[_UPDATED] = self._clock.monotonic_ns()
            for name, value in changes.items():
                values[_INDEX[name]] = value
            slots = values[_SLOTS]
            if slots is not self._packed[0]:
                self._packed = slots, _pack_slots(slots)
            counts = values[_COLLECTIVE], len(slots), values[_SPAN]
            shared = values[_PLAN], values[_KEPT], values[_GROUP]
            self._page.write(_FIXED.pack(*values[:_SLOTS], *counts, *shared) + self._packed[1])
            return RankStatus._make(values)

    def read(self) -> RankStatus | None:
        """The newest whole page; None when none was ever written."""
        body, known = self._page.read(), self._read
        if body is None:
            return None
        if known is None or known[0] is not body:
            try:
                known = self._read = body, _unpack(body)
            except (struct.error, LookupError):  # no rank of this release wrote that
                return None
        return known[1]

    def close(self) -> None:
        self._page.close()


def read_status(memory: Memory, job_dir: Path, rank: int) -> RankStatus | None:
    """What a rank says now, for who looks once; None when there is nothing whole to read."""
    try:
        page = StatusPage(memory, status_path(job_dir, rank))
    except (OSError, ValueError):
        return None
    try:
        return page.read()
    finally:
        page.close()


class StatusPages:
    """The pages of all ranks of a job directory, kept mapped, for who looks often: a page on which
    nothing was written costs no more than its marks. A rank that comes again finds its page as it
    was; where somebody has removed it meanwhile, the new one is mapped."""

    def __init__(self, memory: Memory, job_dir: Path) -> None:
        self._memory, self._job_dir = memory, job_dir
        self._pages: dict[int, StatusPage] = {}

    def read(self, rank: int) -> RankStatus | None:
        """What it says now, the same object for as long as it says nothing else; None when there is
        nothing whole to read."""
        page, is_there = self._find(rank)
        return page.read() if page is not None and is_there else None

    def alive(self, rank: int) -> bool:
        """Whether a living process owns the page that `read` reads."""
        page, is_there = self._find(rank)
        return page is not None and is_there and page.alive()

    def read_mapped(self, rank: int) -> tuple[RankStatus | None, bool]:
        """The same, also of a page that somebody has removed while it was written: who writes it
        has it mapped, too. And whether that is so."""
        page, is_there = self._find(rank)
        return (None, False) if page is None else (page.read(), not is_there)

    def _find(self, rank: int) -> tuple[StatusPage | None, bool]:
        """The page that was mapped last, and whether it is in its place."""
        page = self._pages.get(rank)
        if page is not None and page.is_there():
            return page, True
        try:
            found = StatusPage(self._memory, status_path(self._job_dir, rank))
        except (OSError, ValueError):
            return page, False
        self._drop(rank)
        self._pages[rank] = found
        return found, True

    def read_all(self) -> dict[int, RankStatus]:
        """Of every rank that has something whole to read, in order."""
        ranks = ranks_in(self._memory, self._job_dir)
        for rank in self._pages.keys() - ranks:
            self._drop(rank)
        return {rank: status for rank in ranks if (status := self.read(rank)) is not None}

    def _drop(self, rank: int) -> None:
        page = self._pages.pop(rank, None)
        if page is not None:
            page.close()

    def close(self) -> None:
        for rank in list(self._pages):
            self._drop(rank)


def _pack_slots(slots: tuple[SlotView, ...]) -> bytes:
    return b"".join(
        [
            _SLOT.pack(state, _UNSHARED, *stamp, 0, digest)
            if share is None
            else _SLOT.pack(state, share.ranks, *stamp, share.digest, digest)
            for state, stamp, _, share, digest in slots
        ]
    )


def _unpack(body: bytes) -> RankStatus:
    *fields, collective, count, span_steps, plan, kept, group = _FIXED.unpack_from(body)
    fields[5] = _PHASES[fields[5]]
    views = _unpack_slots(body[_FIXED.size : _FIXED.size + count * _SLOT.size])
    return RankStatus._make((*fields, views, collective, span_steps, plan, kept, group))


@lru_cache(maxsize=1 << 8)
def _unpack_slots(body: bytes) -> tuple[SlotView, ...]:
    """Kept: a page changes more often than its slots, and ranks of one step hold the same."""
    return tuple(
        [
            SlotView(
                _STATES[state],
                Stamp(step, epoch),
                share=None if ranks == _UNSHARED else Share(shared, ranks),
                digest=digest,
            )
            for state, ranks, step, epoch, shared, digest in _SLOT.iter_unpack(body)
        ]
    )
