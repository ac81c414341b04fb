"""Shelf: slots of other nodes' ranks (copies), or of parities, below one directory. This keeper is
their only writer.

The format is that of a rank's own slots (edge/shm/slot.py), so that what rests here can be
verified, scrubbed and sent in the same way.
Invariant: `sealed` names only what was proven, here or by the keeper before (`prove`).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from keepstep.edge.shm.slot import Slot, rank_dir, ranks_in, slot_path, slot_paths
from keepstep.errors import DamageError
from keepstep.model.snapshot import SlotState, SlotView, Stamp
from keepstep.ports import Memory

# what is held for other nodes, and below which part of the job directory
SHELVES = {"copy": "held", "parity": "parity"}
SLOTS = 2  # one stays whole while the next is written
EMPTY_VIEW = SlotView(SlotState.EMPTY, Stamp(-1, 0))


class Shelf:
    """All slots below `root`, mapped."""

    def __init__(self, memory: Memory, root: Path) -> None:
        self._memory, self.root = memory, root
        self._slots: dict[int, list[Slot | None]] = {}
        for rank in ranks_in(memory, root):
            self._slots[rank] = [None] * SLOTS
            for path in slot_paths(memory, root, rank):
                self._adopt(rank, path)

    def _adopt(self, rank: int, path: Path) -> None:
        index = int(path.name.split("-")[1])
        if index < SLOTS:
            try:
                self._slots[rank][index] = Slot(self._memory, path)
            except (DamageError, OSError):
                self._memory.remove(path)

    def prove(self) -> list[str]:
        """Verify everything; what fails is voided. Returns what was wrong."""
        wrong = []
        for rank, slots in self._slots.items():
            for index, slot in enumerate(slots):
                if slot is None:
                    continue
                try:
                    slot.verify_bytes()
                except DamageError as error:
                    wrong.append(str(error))
                    slot.void()
                except LookupError:
                    slot.void()  # its writer died in the middle
                self._slots[rank][index] = slot
        return wrong

    def views(self, rank: int) -> list[SlotView]:
        """As `core.slots.choose` wants them."""
        return [self._view(slot) for slot in self._slots.get(rank, [None] * SLOTS)]

    def _view(self, slot: Slot | None) -> SlotView:
        if slot is None:
            return EMPTY_VIEW
        try:
            header = slot.header()
        except DamageError:
            return EMPTY_VIEW
        return (
            SlotView(header.state, header.stamp)
            if header.state is not SlotState.EMPTY
            else EMPTY_VIEW
        )

    def sealed(self) -> dict[tuple[int, Stamp], Slot]:
        """What rests here."""
        found = {}
        for rank, slots in self._slots.items():
            for slot in slots:
                view = self._view(slot)
                if slot is not None and view.state is SlotState.SEALED:
                    found[(rank, view.stamp)] = slot
        return found

    def of(self, rank: int) -> list[Slot]:
        """All that there are of that rank, whatever they hold."""
        return [slot for slot in self._slots.get(rank, []) if slot is not None]

    def find(self, rank: int, stamp: Stamp) -> Slot | None:
        for slot in self._slots.get(rank, []):
            if (
                slot is not None
                and slot.claims(stamp)
                and self._view(slot) == SlotView(SlotState.SEALED, stamp)
            ):
                return slot
        return None

    def fitting(
        self,
        rank: int,
        index: int,
        payload_capacity: int,
        manifest_capacity: int,
        lacking: frozenset[int] = frozenset(),
    ) -> Slot | None:
        """The slot of that number, if it is there and has so much room (`Slot.fits`)."""
        slot = self._slots.get(rank, [None] * SLOTS)[index]
        if slot is None or not slot.fits(payload_capacity, manifest_capacity, lacking):
            return None
        return slot

    def take(
        self,
        rank: int,
        index: int,
        payload_capacity: int,
        manifest_capacity: int,
        lacking: frozenset[int] = frozenset(),
    ) -> Slot:
        """The slot of that number, made if there is none that is `fitting`. Raises
        MemoryBudgetError."""
        if fitting := self.fitting(rank, index, payload_capacity, manifest_capacity, lacking):
            return fitting
        slots = self._slots.setdefault(rank, [None] * SLOTS)
        slot = slots[index]
        if slot is not None:
            slots[index] = None
            self._memory.remove(slot.path)  # before the other one is made: both might not fit
            slot.close()
        fresh = slots[index] = Slot.create(
            self._memory, slot_path(self.root, rank, index), payload_capacity, manifest_capacity
        )
        return fresh

    def retire(self, slot: Slot) -> None:
        """Give a slot's file up, because somebody may still write into its memory: what comes next
        gets memory of its own."""
        for slots in self._slots.values():
            for index, known in enumerate(slots):
                if known is slot:
                    slots[index] = None
                    self._memory.remove(slot.path)
                    slot.close()

    def void_damaged(self, path: Path) -> tuple[int, Stamp] | None:
        """Forget what rests in that file, if it does not prove: which snapshot it was; None when it
        does. A damaged header names none."""
        for rank, slots in self._slots.items():
            for slot in slots:
                if slot is None or slot.path != path:
                    continue
                view = self._view(slot)
                try:
                    slot.verify_bytes()
                except DamageError:
                    slot.void()
                    return rank, view.stamp
                except LookupError:
                    return None
        return None

    def void_newer(self, stamp: Stamp | None, before_epoch: int | None = None) -> None:
        """Forget what is newer than `stamp` (None: everything) and whatever is half written:
        another computation begins. `before_epoch`: it has begun with that epoch, and what is of it
        or half written stays."""
        for slots in self._slots.values():
            for slot in slots:
                view = self._view(slot)
                if slot is None:
                    continue
                is_void = view.stamp.is_abandoned(stamp, before_epoch)
                if view.state is SlotState.WRITING:
                    is_void = before_epoch is None
                if is_void:
                    slot.void()

    def keep_only(self, ranks: set[int]) -> None:
        """Give up the memory of every other rank."""
        for rank in [r for r in self._slots if r not in ranks]:
            for slot in self._slots.pop(rank):
                if slot is not None:
                    slot.close()
            with suppress(OSError):  # a thread may be making a slot there this moment
                self._memory.remove(rank_dir(self.root, rank))

    @property
    def nbytes(self) -> int:
        return sum(
            slot.capacity for slots in self._slots.values() for slot in slots if slot is not None
        )

    def close(self) -> None:
        for slots in self._slots.values():
            for slot in slots:
                if slot is not None:
                    slot.close()
