"""Pins: slots that are made to stand still while somebody reads them.

Comes in: a job directory, a stamp and ranks. Goes out: those ranks' slots of that stamp under
shared flocks, all of them or none. A rank whose slot is pinned writes into another one, or skips a
step. Locks die with whoever took them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from keepstep.edge.shm.slot import Slot, slot_paths
from keepstep.errors import DamageError
from keepstep.model.snapshot import SlotState, Stamp
from keepstep.ports import Memory


def pin(memory: Memory, job_dir: Path, stamp: Stamp, ranks: Iterable[int]) -> list[Slot] | None:
    """Every rank's slot of `stamp`, locked against overwriting, in their order; None when one is
    not there any more."""
    slots: list[Slot] = []
    for rank in ranks:
        slot = pin_one(memory, job_dir, stamp, rank)
        if slot is None:
            unpin(slots)
            return None
        slots.append(slot)
    return slots


def unpin(slots: Iterable[Slot]) -> None:
    for slot in slots:
        slot.unlock()  # closing does not, while something still looks into the map
        slot.close()


def pin_one(memory: Memory, job_dir: Path, stamp: Stamp, rank: int) -> Slot | None:
    """The rank's slot of `stamp`, locked against overwriting; None when there is none, or it is
    being overwritten."""
    for path in slot_paths(memory, job_dir, rank):
        try:
            slot = Slot(memory, path)
        except (DamageError, OSError):
            continue
        if slot.claims(stamp) and slot.lock(exclusive=False) and _holds(slot, stamp):
            return slot
        slot.close()
    return None


def _holds(slot: Slot, stamp: Stamp) -> bool:
    try:
        header = slot.header()
    except DamageError:
        return False
    return (header.state, header.stamp) == (SlotState.SEALED, stamp)


class OwnSlots:
    """The slots of a job directory's ranks, kept mapped, for who pins them step after step: to map
    one anew costs more than all else about a pin, and a fresh map is slow to read. Safe from any
    thread."""

    def __init__(self, memory: Memory, job_dir: Path) -> None:
        self._memory = memory
        self._job_dir = job_dir
        self._lock = threading.Lock()
        self._slots: dict[int, list[Slot]] = {}  # by rank
        self._pins: dict[Slot, int] = {}  # how often each is pinned: the lock is the map's
        self._gone: set[Slot] = set()  # pinned, and without a name: closed by who unpins it last

    def pin(self, stamp: Stamp, rank: int) -> Slot | None:
        """As `pin_one`. To be given back by `unpin`, and never closed."""
        with self._lock:
            return self._pin_known(stamp, rank) or self._pin_fresh(stamp, rank)

    def _pin_known(self, stamp: Stamp, rank: int) -> Slot | None:
        for slot in self._slots.get(rank, ()):
            if slot.claims(stamp) and slot.is_there() and self._take(slot, stamp):
                return slot
        return None

    def _pin_fresh(self, stamp: Stamp, rank: int) -> Slot | None:
        """In a slot that was made since the last look."""
        self._drop_gone(rank)
        known = {slot.path for slot in self._slots.get(rank, ())}
        for path in slot_paths(self._memory, self._job_dir, rank):
            if path in known:
                continue
            try:
                slot = Slot(self._memory, path)
            except (DamageError, OSError):
                continue
            self._slots.setdefault(rank, []).append(slot)
            if slot.claims(stamp) and self._take(slot, stamp):
                return slot
        return None

    def _take(self, slot: Slot, stamp: Stamp) -> bool:
        pins = self._pins.get(slot, 0)
        if not pins and not slot.lock(exclusive=False):
            return False
        if not _holds(slot, stamp):
            if not pins:
                slot.unlock()
            return False
        self._pins[slot] = pins + 1
        return True

    def unpin(self, slot: Slot) -> None:
        with self._lock:
            self._pins[slot] -= 1
            if self._pins[slot]:
                return
            del self._pins[slot]
            slot.unlock()
            if slot in self._gone:
                self._gone.discard(slot)
                slot.close()

    def drop_gone(self) -> None:
        """Unmap what has no name any more: its memory is free only then."""
        with self._lock:
            for rank in list(self._slots):
                self._drop_gone(rank)

    def _drop_gone(self, rank: int) -> None:
        for slot in [slot for slot in self._slots.get(rank, ()) if not slot.is_there()]:
            self._slots[rank].remove(slot)
            if slot in self._pins:
                self._gone.add(slot)
            else:
                slot.close()


class Pin:
    """A slot that must stand still while anything of it is on its way: the last who lets go unpins
    it, on whatever thread."""

    def __init__(self, slot: Slot, unpin: Callable[[Slot], None]) -> None:
        self.slot = slot
        self._unpin = unpin
        self._users = 1
        self._lock = threading.Lock()

    def take(self) -> None:
        with self._lock:
            self._users += 1

    @property
    def users(self) -> int:
        """How many look at it: who pinned it, until it lets go, and what is on its way."""
        return self._users

    def let_go(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._unpin(self.slot)
