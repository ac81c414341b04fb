"""Page locks: slots whose pages CUDA may write to and read from directly.

CUDA knows a page-locked range by its address alone. A range that is unmapped while it is registered
is a trap: the next map may lie at that address, over other pages, and the device would go on
writing to the old ones. So a lock belongs to one map, and ends before the map does.

Comes in: slots as they are mapped and before they are unmapped, copies as they begin and end. Goes
out: calls of CUDA, and in words why one was refused: then the driver copies through memory of its
own, which is right and takes longer.

Invariant: no page of a map is registered twice, and it is there for as long as it is registered,
also where its slot is dropped without being closed (`_kept`). A forked child calls nothing: the
locks are its parent's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from keepstep.edge.shm.slot import Slot
from keepstep.model.shares import runs_of
from keepstep.model.units import human_bytes


class PageLocker(Protocol):
    """What is needed of CUDA, for one device. Called from any thread."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Lock these pages. Why that is refused; None when it is not."""

    def unregister(self, address: int) -> str | None:
        """Unlock the pages that were registered at this address. Likewise."""


@dataclass
class _Lock:
    """`ranges`: where they begin and how long they are. `copies`: under way to or from it.
    `is_ending`: the slot is closed, and the last of these copies ends the lock."""

    ranges: list[tuple[int, int]]
    copies: int = 0
    is_ending: bool = False


# The maps that CUDA knows as locked, by their addresses, of all locks of the process. Seen on a
# device: a slot that nobody closed was collected with its locks, the next map lay at its address,
# and the device wrote to the pages of the one before.
_kept: dict[int, memoryview] = {}


class PageLocks:
    """Of one process. Safe to use from any thread."""

    def __init__(self, locker: PageLocker) -> None:
        self._locker = locker
        self._mutex = threading.Lock()
        self._locks: dict[Slot, _Lock] = {}
        self._pid = os.getpid()

    def lock(self, slot: Slot) -> str | None:
        """Lock a slot's payload until the slot is closed, but for what it lacks: a lock would give
        that memory again. None when it is locked, else one line that says why it is not; the slot
        can be used all the same. What is locked, and lacks more by now, is locked anew unless a
        copy is under way."""
        with self._mutex:
            if os.getpid() != self._pid:
                return None
            known, wanted = self._locks.get(slot), list(_ranges_of(slot))
            if known is not None and (known.ranges == wanted or known.copies):
                return None
            if known is not None and not self._unlock(slot, known):
                return None  # it stays locked, and takes the memory of all
            lock = _Lock([])
            for address, nbytes in wanted:
                why = self._locker.register(address, nbytes)
                if why is not None:
                    self._unlock(slot, lock)
                    return _refusal(slot, why)
                begin = address - slot.payload_address
                _kept[address] = slot.payload[begin : begin + nbytes]
                lock.ranges.append((address, nbytes))
            self._locks[slot] = lock
        if known is None:
            slot.before_close(lambda: self._end(slot))
        return None

    def is_locked(self, slot: Slot) -> bool:
        """Whether a device copies to and from it without holding who asks for that."""
        with self._mutex:
            return slot in self._locks

    def begin_copy(self, slot: Slot) -> None:
        """A device is about to write to the slot, or to read from it."""
        with self._mutex:
            if slot in self._locks:
                self._locks[slot].copies += 1

    def end_copy(self, slot: Slot) -> None:
        """It is through with that, or will never do it."""
        with self._mutex:
            lock = self._locks.get(slot)
            if lock is None or not lock.copies:
                return
            lock.copies -= 1
            if lock.is_ending and not lock.copies:
                self._unlock(slot, lock)

    def _end(self, slot: Slot) -> None:
        """The slot is closed."""
        with self._mutex:
            lock = self._locks.get(slot)
            if lock is None:
                return
            lock.is_ending = True
            if os.getpid() != self._pid:
                del self._locks[slot]
                for address, _ in lock.ranges:
                    del _kept[address]
            elif not lock.copies:
                self._unlock(slot, lock)

    def _unlock(self, slot: Slot, lock: _Lock) -> bool:
        """Whether all of it is."""
        # What CUDA does not let go of stays mapped until the process ends: nothing else can then
        # lie at its address.
        for address, nbytes in list(lock.ranges):
            if self._locker.unregister(address) is None:
                lock.ranges.remove((address, nbytes))
                _kept.pop(address).release()
        if not lock.ranges:
            self._locks.pop(slot, None)
        return not lock.ranges


def _ranges_of(slot: Slot) -> Iterator[tuple[int, int]]:
    """Where the memory of the payload is, and how much."""
    at, size = 0, slot.block_bytes
    for first, count in runs_of(slot.lacking()):
        if first * size > at:
            yield slot.payload_address + at, first * size - at
        at = (first + count) * size
    if at < slot.capacity:
        yield slot.payload_address + at, slot.capacity - at


def _refusal(slot: Slot, why: str) -> str:
    return (
        f"CUDA does not page-lock {slot.path.name} ({human_bytes(slot.capacity)}): {why}; captures "
        "go on through the driver's own memory, which takes longer; where locked memory is limited "
        "(`ulimit -l`), raise the limit, or set fewer slots"
    )
