"""Pins: slots that are made to stand still while somebody reads them.

Comes in: a job directory, a stamp and ranks. Goes out: those ranks' slots of that stamp under
shared flocks, all of them or none. A rank whose slot is pinned writes into another one, or skips a
step. Locks die with whoever took them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
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


class Pin:
    """A slot that must stand still while anything of it is on its way: the last who lets go unlocks
    it, on whatever thread."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._users = 1
        self._lock = threading.Lock()

    def take(self) -> None:
        with self._lock:
            self._users += 1

    @property
    def is_shared(self) -> bool:
        """Whether anything of it is on its way."""
        return self._users > 1

    def let_go(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            unpin([self.slot])
