"""Device digests: of the blocks of one slot that replicas share, what is to be multiplied and added
where, worked out once as the copies are.

Comes in: which blocks are shared and which of them others keep, tensors on devices and on the host
with their places. Goes out: pieces for the copy stream to digest, and in the end one digest a
block. What lies on the host within such a block (an optimizer's counters of steps) is added there.
Decides nothing about who keeps what.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from keepstep.edge.torch.copy_stream import CopyStream, Landing
from keepstep.edge.torch.digests import (
    LANES,
    WORD_BYTES,
    DigestPiece,
    folded,
    keys_of,
    scratch_words,
)
from keepstep.edge.torch.plan import Pair
from keepstep.model.units import MIB, round_up

PIECE_BYTES = 32 * MIB  # four times as much of the device's memory for the products


@dataclass(frozen=True)
class SharedBlocks:
    """Of one snapshot. `lacking`: those of `shared` that others keep. `seed`: replicas have the
    same."""

    shared: frozenset[int] = frozenset()
    lacking: frozenset[int] = frozenset()
    seed: bytes = b""


@dataclass(frozen=True, eq=False)
class DigestMemory:
    """Of one device, for all slots."""

    keys: torch.Tensor
    scratch: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Sums:
    """One device's. `host`: where they are read."""

    there: torch.Tensor
    host: torch.Tensor


class DigestKeys:
    """Of one job, on each device that needs them."""

    def __init__(self, seed: bytes, block_bytes: int) -> None:
        self.seed, self.block_bytes = seed, block_bytes
        self.host = keys_of(seed, block_bytes // WORD_BYTES)
        self._there: dict[torch.device, DigestMemory] = {}

    def on(self, device: torch.device, stream: CopyStream) -> DigestMemory:
        if device not in self._there:
            count = scratch_words(max(PIECE_BYTES, self.block_bytes))
            scratch = torch.empty(count, dtype=torch.int64, device=device)
            self._there[device] = DigestMemory(stream.bring(self.host), scratch)
        return self._there[device]


class BlockDigests:
    """Of the blocks of one slot, as long as its plan holds. `blocks`: those to digest."""

    def __init__(self, blocks: Collection[int], keys: DigestKeys) -> None:
        self._rows = {block: row for row, block in enumerate(sorted(blocks))}
        self._keys = keys
        self._size = keys.block_bytes
        self._memory: dict[torch.device, DigestMemory] = {}
        self._sums: dict[torch.device, _Sums] = {}
        self._host = _HostParts((), self._rows, keys)

    @property
    def blocks(self) -> Collection[int]:
        return self._rows.keys()

    def use(self, device: torch.device, stream: CopyStream) -> None:
        """Some of the bytes are there."""
        self._memory[device] = self._keys.on(device, stream)
        there = torch.empty(LANES, len(self._rows), dtype=torch.int64, device=device)
        is_real = device.type == "cuda"
        host = torch.empty(there.shape, dtype=torch.int64, pin_memory=is_real)
        self._sums[device] = _Sums(there, host)

    def add_host(self, pairs: Sequence[Pair]) -> None:
        """What lies on the host, addressed."""
        self._host = _HostParts(pairs, self._rows, self._keys)

    def pieces(
        self, device: torch.device, flat: torch.Tensor, offset: int
    ) -> Iterator[DigestPiece]:
        """Of bytes on a device that come to lie at `offset`: whole words."""
        memory, sums, size = self._memory[device], self._sums[device].there, self._size
        at, end = offset, offset + flat.nbytes
        while at < end:
            block, start = divmod(at, size)
            rows, nbytes = 1, min(end, (block + 1) * size) - at
            if nbytes == size:
                most = min(max(1, PIECE_BYTES // size), (end - at) // size)
                while rows < most and block + rows in self._rows and block in self._rows:
                    rows += 1
            width = nbytes // WORD_BYTES
            if block in self._rows:
                words = flat[at - offset : at - offset + rows * nbytes].view(torch.int32)
                first, row = start // WORD_BYTES, self._rows[block]
                yield DigestPiece(
                    words.view(rows, width),
                    memory.keys[:, first : first + width],
                    sums[:, row : row + rows],
                    memory.scratch,
                )
            at += rows * nbytes

    # -- one snapshot

    def begin(self, streams: Mapping[torch.device, CopyStream]) -> None:
        """Before any piece is ordered."""
        for device, sums in self._sums.items():
            streams[device].clear(sums.there)

    def read_back(self, streams: Mapping[torch.device, CopyStream]) -> list[Landing]:
        """When all are ordered: the sums follow them to the host."""
        landings = []
        for device, sums in self._sums.items():
            streams[device].copy([sums.host], [sums.there])
            landings.append(streams[device].mark())
        return landings

    def host_sums(self) -> torch.Tensor:
        """Of what lies on the host, as it is now."""
        return self._host.sums()

    def found(self, host_sums: torch.Tensor) -> dict[int, int]:
        """By block, when all has landed."""
        sums = [host_sums, *(one.host for one in self._sums.values())]
        return dict(zip(self._rows, folded(sums, self._keys.host), strict=True))


class _HostParts:
    """The bytes of host tensors that lie in some blocks. Gathered in one call for each snapshot:
    there are thousands, of a few bytes."""

    def __init__(self, pairs: Sequence[Pair], rows: Mapping[int, int], keys: DigestKeys) -> None:
        self._shape = LANES, len(rows)
        self._sources: list[torch.Tensor] = []
        lengths: list[tuple[int, int]] = []  # where in the words, and how many bytes
        key_numbers: list[int] = []
        row_numbers: list[int] = []
        size = keys.block_bytes
        for item, segment in pairs:
            flat = item.local.detach().reshape(-1).view(torch.uint8)
            for block in range(segment.offset // size, (segment.end - 1) // size + 1):
                if block not in rows:
                    continue
                begin, end = max(segment.offset, block * size), min(segment.end, (block + 1) * size)
                words = round_up(end - begin, WORD_BYTES) // WORD_BYTES
                first = (begin - block * size) // WORD_BYTES
                self._sources.append(flat[begin - segment.offset : end - segment.offset])
                lengths.append((len(key_numbers), end - begin))
                key_numbers += range(first, first + words)
                row_numbers += [rows[block]] * words
        self._words = torch.zeros(len(key_numbers), dtype=torch.int32)
        as_bytes = self._words.view(torch.uint8)
        self._parts = [as_bytes[4 * word : 4 * word + nbytes] for word, nbytes in lengths]
        self._keys = keys.host[:, torch.tensor(key_numbers, dtype=torch.int64)]
        self._rows = torch.tensor(row_numbers, dtype=torch.int64)

    def sums(self) -> torch.Tensor:
        found = torch.zeros(self._shape, dtype=torch.int64)
        if self._sources:
            torch._foreach_copy_(self._parts, self._sources)
            found.index_add_(1, self._rows, self._words.to(torch.int64) * self._keys)
        return found
