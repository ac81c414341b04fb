"""Page locks: slots whose pages CUDA may write to and read from directly.

CUDA knows a page-locked range by its address alone. A range that is unmapped while it is registered
is a trap: the next map may lie at that address, over other pages, and the device would go on
writing to the old ones. So a lock belongs to one map, and ends before the map does.

Comes in: slots as they are mapped and before they are unmapped, copies as they begin and end. Goes
out: calls of CUDA, and in words why one was refused: then the driver copies through memory of its
own, which is right and takes longer.

Invariant: a map is registered at most once, and it is there for as long as it is registered, also
where its slot is dropped without being closed (`_kept`). A forked child calls nothing: the locks
are its parent's.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Protocol

from keepstep.edge.shm.slot import Slot
from keepstep.model.units import human_bytes


class PageLocker(Protocol):
    """What is needed of CUDA, for one device. Called from any thread."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Lock these pages. Why that is refused; None when it is not."""

    def unregister(self, address: int) -> str | None:
        """Unlock the pages that were registered at this address. Likewise."""


@dataclass
class _Lock:
    """`copies`: under way to or from it. `is_ending`: the slot is closed, and the last of these
    copies ends the lock."""

    address: int
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
        """Lock a slot's payload until the slot is closed. None when it is locked, else one line
        that says why it is not; the slot can be used all the same."""
        with self._mutex:
            if slot in self._locks or os.getpid() != self._pid:
                return None
            address = slot.payload_address
            why = self._locker.register(address, slot.capacity)
            if why is not None:
                return _refusal(slot, why)
            _kept[address] = slot.payload
            self._locks[slot] = _Lock(address)
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
                del self._locks[slot], _kept[lock.address]
            elif not lock.copies:
                self._unlock(slot, lock)

    def _unlock(self, slot: Slot, lock: _Lock) -> None:
        # What CUDA does not let go of stays mapped until the process ends: nothing else can then
        # lie at its address.
        if self._locker.unregister(lock.address) is None:
            del self._locks[slot]
            _kept.pop(lock.address).release()


def _refusal(slot: Slot, why: str) -> str:
    return (
        f"CUDA does not page-lock {slot.path.name} ({human_bytes(slot.capacity)}): {why}; captures "
        "go on through the driver's own memory, which takes longer; where locked memory is limited "
        "(`ulimit -l`), raise the limit, or set fewer slots"
    )
