"""Sealed: whether live tensors are, byte for byte, what was sealed.

Their bytes are hashed where they lie, in the order in which the snapshot has them, and compared
with the table that was sealed with it. So one reading proves two things: that they are what lies in
the slot, and that this is what was captured. From a device they come back a block at a time, into
one page-locked block a thread: the host never holds more of them.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping

import torch

from keepstep.coding.checksum import in_threads, running_checksum
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.views import in_pieces
from keepstep.model.layout import Layout
from keepstep.model.snapshot import SlotHeader

Buffer = memoryview | ctypes.Array[ctypes.c_char]


class LiveBlocks:
    """The blocks of a snapshot's payload, with live tensors' bytes in the tensors' places; all the
    rest (the tree, gaps, what has no live tensor) is the slot's. `live`: by name."""

    def __init__(
        self, slot: Slot, header: SlotHeader, layout: Layout, live: Mapping[str, torch.Tensor]
    ) -> None:
        self._slot, self._header = slot, header
        found = [(s, in_pieces(live[s.spec.name])) for s in layout.segments if s.spec.name in live]
        self.fit = all(tensor.nbytes == s.spec.nbytes for s, tensor in found)
        self._places = [(s.offset, s.end, tensor) for s, tensor in found if s.spec.nbytes]
        self._ends = [end for _, end, _ in self._places]
        self._of_thread = threading.local()

    def are_sealed(self, threads: int) -> bool:
        """Raises DamageError when the table does not prove, LookupError when the slot holds
        something else by now."""
        if self._slot.header() != self._header:
            raise LookupError(f"{self._slot.path} was overwritten while it was loaded")
        if not self.fit:
            return False
        table = self._slot.table(self._header)
        sums = in_threads(self._sum_of, range(len(table)), threads)
        return list(table) == sums

    def _sum_of(self, block: int) -> int:
        hasher = running_checksum()
        for part in self._parts_of(block):
            hasher.update(part)
        return hasher.intdigest()

    def _on_host(self, part: torch.Tensor) -> torch.Tensor:
        """Itself where it is there; what comes from a device is valid until the next one comes."""
        if part.device.type != "cuda":
            return part.cpu()
        block: torch.Tensor | None = getattr(self._of_thread, "block", None)
        if block is None:
            size = self._header.block_bytes
            block = self._of_thread.block = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return block[: part.nbytes].copy_(part)

    def _parts_of(self, block: int) -> Iterator[Buffer]:
        at = block * self._header.block_bytes
        until = min(at + self._header.block_bytes, self._header.payload_bytes)
        payload = self._slot.payload
        for offset, end, tensor in self._places[bisect_right(self._ends, at) :]:
            if offset >= until:
                break
            if offset > at:
                yield payload[at:offset]
                at = offset
            nbytes = min(end, until) - at
            part = self._on_host(tensor[at - offset : at - offset + nbytes])
            yield (ctypes.c_char * nbytes).from_address(part.data_ptr())
            at += nbytes
        if at < until:
            yield payload[at:until]
