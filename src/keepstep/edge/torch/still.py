"""Still: which blocks of a snapshot hold nothing but what is copied behind the trainer's back, from
where it lies in host memory, or value for value on a device. Those alone may be left to a replica:
their checksums, or digests, can be taken without a copy.

Comes in: a gathered state. Goes out: numbers of blocks, the same object for as long as nothing has
changed.
"""

from __future__ import annotations

from collections.abc import Set

import torch

from keepstep.edge.torch.plan import CopyOrder
from keepstep.edge.torch.state import State
from keepstep.edge.torch.tree import StateItem, is_flat
from keepstep.model.layout import Layout


class StillBlocks:
    """Of one training, remembered from one boundary to the next."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._planned: CopyOrder | None = None
        self._others: list[bool] = []
        self._known: frozenset[int] = frozenset()

    def of(
        self, state: State, block_bytes: int, devices: Set[torch.device] = frozenset()
    ) -> frozenset[int]:
        """The numbers of whole blocks. `devices`: those that digest."""
        planned, others = state.copies
        flags = [item.lazy and _is_hashed(item, devices) for item in others.items]
        is_known = state.layout is self._layout and flags == self._others
        if not is_known or not _are_alike(planned, self._planned):
            self._layout, self._planned, self._others = state.layout, planned, flags
            self._known = still_blocks(state, block_bytes, devices)
        return self._known


def _are_alike(one: CopyOrder, other: CopyOrder | None) -> bool:
    """Whether they are of one plan, or both of nothing."""
    return one is other or (other is not None and not one.items and not other.items)


def _is_hashed(item: StateItem, devices: Set[torch.device]) -> bool:
    """Whether that can be done where it lies."""
    return item.address is not None or (item.local.device in devices and is_flat(item.local))


def still_blocks(
    state: State, block_bytes: int, devices: Set[torch.device] = frozenset()
) -> frozenset[int]:
    """The same, worked out."""
    lazy = {
        segment.offset
        for copies in state.copies
        for item, segment in copies.lazy.pairs
        if _is_hashed(item, devices)
    }
    found = set(range(state.layout.objects_offset // block_bytes))
    for segment in state.layout.segments:
        if segment.spec.nbytes and segment.offset not in lazy:
            blocks = range(segment.offset // block_bytes, (segment.end - 1) // block_bytes + 1)
            found.difference_update(blocks)
    return frozenset(found)
