"""Frozen digests: whether a slot holds what frozen tensors on devices hold now, asked where they
are.

What a slot has of them was digested on the device as it was copied, under one fence: that digest is
of those bytes. At a later boundary nothing of them is copied. They are digested again, behind
everything that is copied, and nobody waits: what is equal then is what the slot has. Digests are
those of `digests.py`: a block that has changed counts as the same with probability 2^-64 over the
choice of keys. And so that the slot still has it, its bytes are hashed each time, as all bytes of a
snapshot are, and must be those that landed.

What differs has changed behind its counter before the boundary, or since. Nobody can tell which: by
then the trainer has gone on. A copy that began now could hold what a later kernel wrote, so none is
made, and the snapshot is torn.

Comes in: frozen tensors with their places in one slot. Goes out: pieces for the copy stream to
digest, marks of what a slot has, names of what differs. Decides nothing about what is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from keepstep.coding.checksum import checksum, in_threads
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.copy_stream import CopyStream, Landing
from keepstep.edge.torch.device_digests import BlockDigests, DigestKeys
from keepstep.edge.torch.digests import DigestPiece
from keepstep.edge.torch.plan import Pair
from keepstep.model.layout import ALIGN_BYTES

Streams = Mapping[torch.device, CopyStream]


class FrozenWay(Enum):
    """What becomes of the frozen tensors of one snapshot."""

    COPIED = "copied"
    MARKED = "copied, and digested for later"
    COMPARED = "digested"


@dataclass(frozen=True, slots=True)
class FrozenMarks:
    """Of what one slot has. `digests`: of blocks, by the device; `sums`: of stretches of the
    payload, by the host."""

    digests: Mapping[int, int]
    sums: Sequence[int]


class FrozenDigests:
    """Of one slot, as long as its plan holds."""

    def __init__(
        self, pairs: Sequence[Pair], keys: DigestKeys, streams: Streams, block_bytes: int
    ) -> None:
        """Raises torch's OutOfMemoryError where a device has no room for the keys."""
        self._size = block_bytes
        self.pairs = sorted(pairs, key=lambda pair: pair[1].offset)
        self._offsets = {segment.offset for _, segment in self.pairs}
        self._stretches = list(_stretches(self.pairs, block_bytes))
        self._digests = BlockDigests({begin // block_bytes for begin, _ in self._stretches}, keys)
        for device in dict.fromkeys(item.local.device for item, _ in self.pairs):
            self._digests.use(device, streams[device])

    def has(self, pair: Pair) -> bool:
        return pair[1].offset in self._offsets

    def pieces_of(self, pairs: Iterable[Pair]) -> Iterator[DigestPiece]:
        """Of those that are among them."""
        for item, segment in filter(self.has, pairs):
            flat = item.local.detach().reshape(-1).view(torch.uint8)
            yield from self._digests.pieces(item.local.device, flat, segment.offset)

    # -- one snapshot

    def begin(self, streams: Streams) -> None:
        """Before any piece is ordered."""
        self._digests.begin(streams)

    def read_back(self, streams: Streams) -> list[Landing]:
        """When all are ordered."""
        return self._digests.read_back(streams)

    def marks(self, slot: Slot, known: Mapping[int, int], threads: int) -> FrozenMarks:
        """When all has landed. `known`: checksums of blocks, taken since then."""
        size, payload, stretches = self._size, slot.payload, self._stretches

        def sum_of(number: int) -> int:
            begin, end = stretches[number]
            found = known.get(begin // size) if end - begin == size else None
            return checksum(payload[begin:end]) if found is None else found

        sums = in_threads(sum_of, range(len(stretches)), threads)
        return FrozenMarks(self._digests.found(self._digests.host_sums()), sums)

    def sums_of_blocks(self, marks: FrozenMarks) -> dict[int, int]:
        """Of those that hold nothing else."""
        pairs = zip(self._stretches, marks.sums, strict=True)
        return {b // self._size: found for (b, e), found in pairs if e - b == self._size}

    def moved(self, before: FrozenMarks, now: FrozenMarks) -> list[str]:
        """The names of those in blocks that are not as they were, on the device or in the slot."""
        then = before.digests
        blocks = {block for block, found in now.digests.items() if then.get(block) != found}
        sums = zip(self._stretches, before.sums, now.sums, strict=True)
        blocks |= {begin // self._size for (begin, _), old, new in sums if old != new}
        return [
            item.spec.name
            for item, s in self.pairs
            if not blocks.isdisjoint(range(s.offset // self._size, (s.end - 1) // self._size + 1))
        ]


def _stretches(pairs: Sequence[Pair], size: int) -> Iterator[tuple[int, int]]:
    """Where they are in the payload, with what little is between them, cut where blocks end: what
    is as long as a block has all of it."""
    runs: list[list[int]] = []
    for _, segment in pairs:
        if runs and segment.offset - runs[-1][1] < ALIGN_BYTES:
            runs[-1][1] = segment.end
        else:
            runs.append([segment.offset, segment.end])
    for begin, end in runs:
        for block in range(begin // size, (end - 1) // size + 1):
            yield max(begin, block * size), min(end, (block + 1) * size)
