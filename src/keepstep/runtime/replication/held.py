"""Held: what rests on this node for others, whatever mesh there is: copies, and parities.

Comes in: slots that the holder fills. Goes out: what is here and proven. Lives as long as the
keeper; who owns what, and what is on its way, belongs to a mesh (`holder.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from keepstep.edge.shm.slot import Slot
from keepstep.edge.shm.slot_header import parse_page
from keepstep.edge.shm.slot_store import Shelf
from keepstep.errors import DamageError, MemoryBudgetError
from keepstep.model.restore_sources import HeldParity, HeldShare, HeldSnapshot
from keepstep.model.shares import Share
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import Part
from keepstep.ports import Executor, Memory
from keepstep.runtime.replication.dedup import BlockDedup
from keepstep.runtime.replication.encode import ParityContents, contents_from
from keepstep.runtime.slot_locks import OwnSlots

Made = Callable[[Slot | MemoryBudgetError], None]


class HeldSnapshots:
    """One node's. `own`: the slots of the node's own ranks, with which they are compared."""

    def __init__(self, memory: Memory, workers: Executor, job_dir: Path) -> None:
        self._workers = workers
        self.copies = Shelf(memory, job_dir / "held")
        self.parities = Shelf(memory, job_dir / "parity")
        self.own = OwnSlots(memory, job_dir)
        self.dedup = BlockDedup(self.own, memory.block_bytes)
        self.is_proven = False  # all that the keeper before has left
        self._contents: dict[tuple[int, Stamp], ParityContents] = {}
        self._shares: dict[tuple[int, Stamp], list[HeldShare]] = {}  # by parity
        self._making: set[tuple[Shelf, int]] = set()

    def prove(self) -> list[str]:
        """Verify everything; what fails is given up. Why, of each that did. Takes long."""
        return [*self.copies.prove(), *self.parities.prove()]

    def snapshots(self, world_size: int) -> list[HeldSnapshot]:
        """The copies that rest here, of a job of that size: one of another size can do nothing with
        them."""
        return [
            HeldSnapshot(rank, stamp)
            for (rank, stamp), slot in self.copies.sealed().items()
            if _world_size(slot) == world_size
        ]

    def has_copy(self, rank: int, stamp: Stamp) -> bool:
        """Whether one rests here."""
        return self.copies.find(rank, stamp) is not None

    def coded(self, world_size: int) -> list[HeldParity]:
        """The parities that rest here, likewise."""
        sealed = self.parities.sealed()
        self._contents = {key: known for key, known in self._contents.items() if key in sealed}
        found = []
        for (rank, stamp), slot in sealed.items():
            if _world_size(slot) != world_size:
                continue
            stripes = self.contents(rank, stamp, slot).stripes
            found.append(HeldParity(rank, stamp, stripes.members, stripes.tolerates))
        return found

    def shares(self, world_size: int) -> list[HeldShare]:
        """What copies that rest here tell of what their ranks share, and what the headers beside
        parities do."""
        found = []
        for (rank, stamp), slot in self.copies.sealed().items():
            share = _share(slot)
            if share is not None and _world_size(slot) == world_size:
                found.append(HeldShare(rank, stamp, share))
        sealed = self.parities.sealed()
        self._shares = {key: known for key, known in self._shares.items() if key in sealed}
        for key, slot in sealed.items():
            if _world_size(slot) == world_size:
                if key not in self._shares:
                    self._shares[key] = self._beside_parity(*key, slot)
                found += self._shares[key]
        return found

    def _beside_parity(self, mine: int, stamp: Stamp, slot: Slot) -> list[HeldShare]:
        contents, found = self.contents(mine, stamp, slot), []
        for rank in contents.metas:
            start, nbytes = contents.where(rank, Part.HEADER)
            page = bytes(slot.payload[start : start + nbytes])
            try:
                share = parse_page(page, slot.path).share
            except DamageError:
                continue  # a bit has flipped at rest: scrubbing will find it
            if share is not None:
                found.append(HeldShare(rank, stamp, share))
        return found

    def contents(self, rank: int, stamp: Stamp, slot: Slot) -> ParityContents:
        """What the parity of that rank and stamp, in that slot, consists of. Raises DamageError."""
        known = self._contents.get((rank, stamp))
        if known is None:
            known = contents_from(slot.manifest_text(slot.header()), slot.block_bytes)
            self._contents[(rank, stamp)] = known
        return known

    def remember(self, rank: int, stamp: Stamp, contents: ParityContents) -> None:
        """A parity was sealed."""
        self._contents[(rank, stamp)] = contents

    def members_of(self, rank: int, stamp: Stamp) -> tuple[int, ...]:
        """The stripe group of a parity that is given up, if it is remembered."""
        known = self._contents.pop((rank, stamp), None)
        return () if known is None else known.stripes.members

    def forget_newer(self, stamp: Stamp | None, before_epoch: int | None = None) -> None:
        """All ranks go back to `stamp` (None: to something that is not in memory)."""
        self.copies.void_newer(stamp, before_epoch)
        self.parities.void_newer(stamp, before_epoch)

    def keep_only(self, copies: set[int], parities: set[int]) -> None:
        """Give up what is held of all other ranks."""
        self.copies.keep_only(copies)
        self.parities.keep_only(parities)

    def is_making(self, shelf: Shelf, rank: int) -> bool:
        """Whether a slot is being made there this moment."""
        return (shelf, rank) in self._making

    def make(
        self, shelf: Shelf, rank: int, work: Callable[[], Slot | MemoryBudgetError], made: Made
    ) -> None:
        """Have a worker make a slot of that rank: touching memory is not the loop's work. Nobody
        else makes one there until then."""
        self._making.add((shelf, rank))

        def then(found: Slot | MemoryBudgetError) -> None:
            self._making.discard((shelf, rank))
            made(found)

        self._workers.submit(work, then)


def _share(slot: Slot) -> Share | None:
    try:
        return slot.header().share
    except DamageError:
        return None


def _world_size(slot: Slot) -> int:
    """Of the job whose snapshot it holds; 0 when that cannot be read."""
    try:
        return slot.header().world_size
    except DamageError:
        return 0
