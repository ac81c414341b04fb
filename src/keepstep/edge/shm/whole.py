"""Whole: a snapshot of which other ranks keep blocks, put together from their slots.

Comes in: a sealed slot. Goes out: the same slot with nothing lacking: a map in which the blocks
that it has not are those of its neighbours (the slots of the same stamp beside it, among what was
brought here for it, and among what rests here for other nodes), of which their tables say that they
are equal. Copies nothing. Equal means equal XXH3-64 and length; where a block was left to others on
a device there is no XXH3 of this rank's own, and equal means that both told one digest of all that
they share. Whoever reads proves every block by this slot's own table, as that of any slot, and a
block of the latter kind by its keeper's.

Invariant: the neighbours' slots stand still, under shared locks, until the whole one is closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from keepstep.edge.shm.slot import Slot, ranks_in, slot_paths
from keepstep.errors import DamageError
from keepstep.model.shares import Share, blocks_of, is_same_share
from keepstep.model.snapshot import SlotHeader, SlotState
from keepstep.ports import Memory

SHARED = "shared"  # below it lies what ranks of other nodes keep for those here, while it is needed
_PARTS = (SHARED, "held")  # the latter may be overwritten where ranks train meanwhile


@contextmanager
def whole(memory: Memory, slot: Slot) -> Iterator[Slot]:
    """The slot itself where it lacks nothing; else one to read from until the end of this.

    Raises DamageError when its header, or its table, does not prove; LookupError when it holds no
    snapshot, or when what it lacks is in no neighbour's slot that stands still.
    """
    header = slot.header()
    lacking = blocks_of(header.lacking)
    if not lacking or header.state is not SlotState.SEALED:
        yield slot
        return
    table = list(slot.table(header))
    with ExitStack() as opened:
        share = header.share if header.is_digested else None
        wanted = {block: table[block] for block in lacking if block < len(table)}
        owners = dict.fromkeys(range(len(table)), slot)
        for neighbour in _neighbours(memory, slot.path, header, opened):
            for block, told in list(wanted.items()):
                checksum = neighbour.checksum_of(block, told, share)
                if checksum is not None:
                    owners[block], table[block] = neighbour.slot, checksum
                    del wanted[block]
            if not wanted:
                break
        if wanted:
            raise LookupError(
                f"{slot.path}: {header.stamp} of rank {header.rank} lacks {len(lacking)} blocks, "
                f"which other ranks keep; {len(wanted)} of them, from block {min(wanted)} on, are "
                "with nobody"
            )
        joined = slot.joined([owners[block] for block in range(len(table))], table)
        opened.callback(joined.close)
        yield joined


class _Neighbour:
    """Another rank's slot of the same stamp, locked."""

    def __init__(self, slot: Slot, header: SlotHeader) -> None:
        self.slot = slot
        self._table = slot.table(header)
        self._lacking = blocks_of(header.lacking)
        self._share = header.share
        self._full = header.payload_bytes // header.block_bytes

    def checksum_of(self, block: int, told: int, share: Share | None) -> int | None:
        """Of a block for which another rank's table tells that, and which is here; None where it
        is not, or not known to be equal. `share`: what that rank told of all that it shares, where
        that counts."""
        # a block that is shared is never a snapshot's last one, which may be shorter
        if block >= self._full or block in self._lacking:
            return None
        own = self._table[block]
        return own if own == told or is_same_share(self._share, share) else None


def _neighbours(
    memory: Memory, path: Path, header: SlotHeader, opened: ExitStack
) -> Iterator[_Neighbour]:
    root = path.parent.parent
    job_dir = root.parent if root.name in _PARTS else root
    for place in (job_dir, *(job_dir / part for part in _PARTS)):
        for rank in ranks_in(memory, place):
            if rank == header.rank:
                continue
            for other in slot_paths(memory, place, rank):
                found = _open(memory, other, header, opened)
                if found is not None:
                    yield found
                    break


def _open(memory: Memory, path: Path, header: SlotHeader, opened: ExitStack) -> _Neighbour | None:
    try:
        slot = Slot(memory, path)
    except (DamageError, OSError):
        return None
    try:
        if slot.claims(header.stamp) and slot.lock(exclusive=False):
            found = slot.header()
            same = (header.job_hash, header.stamp, header.block_bytes)
            is_same = (found.job_hash, found.stamp, found.block_bytes) == same
            if found.state is SlotState.SEALED and is_same:
                neighbour = _Neighbour(slot, found)
                opened.callback(_let_go, slot)
                return neighbour
    except DamageError:
        pass
    _let_go(slot)
    return None


def _let_go(slot: Slot) -> None:
    slot.unlock()  # closing does not, while something still looks into the map
    slot.close()
