"""Proven payload: a slot's payload, read block by block and proven as it is read.

Comes in: a sealed slot that its reader has locked. Goes out: bytes of blocks whose checksum was
right, in a bounded number of blocks. Reads the file and not the map, whose pages would all stay in
the reader's memory; where other ranks keep some of the blocks, a map of all those files.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from keepstep.coding.checksum import checksum
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.shm.whole import whole
from keepstep.errors import DamageError
from keepstep.model.units import PAGE_BYTES

CACHED_BLOCKS = 2  # a read that begins in one block ends in the next


class ProvenPayload:
    """One slot's. `close` it; the slot is its opener's."""

    def __init__(self, slot: Slot) -> None:
        """Proves header, table and manifest. Raises DamageError, LookupError when it holds no
        snapshot or what other ranks keep of it is not there, OSError."""
        self.header = slot.verify_frame()
        self.layout = slot.manifest(self.header)
        self.path = slot.path
        self._table = slot.table(self.header)
        self._at = PAGE_BYTES
        self._cache: dict[int, bytearray] = {}
        self._opened = ExitStack()
        self._joined: Slot | None = None
        if self.header.lacking:
            self._joined = self._opened.enter_context(whole(MEMORY, slot))
            self._table = self._joined.table(self.header)
        self._fd = os.open(slot.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not slot.is_there():
            self.close()
            raise LookupError(f"{slot.path} was replaced while it was opened")

    def close(self) -> None:
        self._opened.close()
        os.close(self._fd)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill the target with the payload's bytes from there on. Raises DamageError."""
        block_bytes, done = self.header.block_bytes, 0
        while done < len(target):
            block, start = divmod(offset + done, block_bytes)
            part = memoryview(self._block(block))[start : start + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)

    def _block(self, number: int) -> bytearray:
        if number not in self._cache:
            oldest = next(iter(self._cache)) if len(self._cache) == CACHED_BLOCKS else None
            data = bytearray() if oldest is None else self._cache.pop(oldest)
            self._cache[number] = self._proven(number, data)
        return self._cache[number]

    def _proven(self, number: int, data: bytearray) -> bytearray:
        """`data`, which has room for it, as the block."""
        start = number * self.header.block_bytes
        nbytes = min(self.header.block_bytes, self.header.payload_bytes - start)
        assert nbytes > 0, f"block {number} lies behind the payload"
        if len(data) != nbytes:
            data = bytearray(nbytes)
        if self._joined is None:
            found_bytes = os.preadv(self._fd, [data], self._at + start)
        else:
            data[:] = self._joined.payload[start : start + nbytes]
            found_bytes = nbytes
        found, want = checksum(data), self._table[number]
        if found_bytes != nbytes or found != want:
            raise DamageError(
                f"{self.path}: {self.header.stamp} of rank {self.header.rank} damaged: block "
                f"{number} (payload bytes {start} to {start + nbytes}) has checksum {found:016x}, "
                f"expected {want:016x}"
            )
        return data
