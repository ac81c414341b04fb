"""Tensors: two of one kind, compared a pair of windows at a time.

Comes in: two saved tensors. Goes out: nothing where all bytes are equal, else how they differ.
Bytes are compared first, up to the first window that differs; a tensor that has one is read again
for its numbers. Holds two windows, whatever the tensors' sizes.

Parts that were cut alike are read from end to end. Where they were cut differently (another number
of ranks), what two parts have in common is read in bands of whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from keepstep.edge.shm import memory
from keepstep.edge.torch.comparison.numbers import DifferenceSums
from keepstep.edge.torch.comparison.saved import SavedPart, SavedTensor
from keepstep.model.comparison import Difference, TensorBox
from keepstep.model.units import MIB

WINDOW_BYTES = 4 * MIB  # of each side; whole values of every type

Windows = tuple[torch.Tensor, torch.Tensor]  # two of as many bytes


class ApartError(Exception):
    """The two are parts of one tensor that have nothing in common."""


class Comparer:
    """Compares one pair after the other in the same memory."""

    def __init__(self) -> None:
        self._a, self._b = bytearray(WINDOW_BYTES), bytearray(WINDOW_BYTES)

    def difference(self, a: SavedTensor, b: SavedTensor) -> Difference | None:
        """Of two of one kind; None: every byte of what both have is equal. Raises ApartError, and
        what reading raises."""
        assert a.kind == b.kind
        if all(memory.equal(x.data_ptr(), y.data_ptr(), x.numel()) for x, y in self._pairs(a, b)):
            return None
        numbers = DifferenceSums(a.kind)
        for x, y in self._pairs(a, b):
            numbers.add(x, y)
        return numbers.difference()

    def _pairs(self, a: SavedTensor, b: SavedTensor) -> Iterator[Windows]:
        if not math.prod(a.kind.shape):
            return
        itemsize = 1 if a.kind.is_value else getattr(torch, a.kind.dtype).itemsize
        have_any = False
        for one in a.parts:
            for other in b.parts:
                common = one.box.overlap(other.box)
                if common is None:
                    continue
                have_any = True
                if one.box == other.box:
                    yield from self._whole(one, other, itemsize)
                else:
                    yield from self._bands(one, other, common, itemsize)
        if not have_any:
            raise ApartError

    def _whole(self, one: SavedPart, other: SavedPart, itemsize: int) -> Iterator[Windows]:
        total = one.box.count * itemsize
        for at in range(0, total, WINDOW_BYTES):
            nbytes = min(WINDOW_BYTES, total - at)
            yield _read(one, at, nbytes, self._a), _read(other, at, nbytes, self._b)

    def _bands(
        self, one: SavedPart, other: SavedPart, common: TensorBox, itemsize: int
    ) -> Iterator[Windows]:
        row_bytes = max(_row_bytes(part.box, itemsize) for part in (one, other))
        rows = max(1, WINDOW_BYTES // row_bytes)
        for buffer in (self._a, self._b):
            if len(buffer) < row_bytes:
                buffer.extend(bytes(row_bytes - len(buffer)))
        first, end = common.offsets[0], common.offsets[0] + common.shape[0]
        for at in range(first, end, rows):
            band = TensorBox((at, *common.offsets[1:]), (min(rows, end - at), *common.shape[1:]))
            yield (
                _band(one, band, itemsize, self._a),
                _band(other, band, itemsize, self._b),
            )


def _row_bytes(box: TensorBox, itemsize: int) -> int:
    return math.prod(box.shape[1:]) * itemsize


def _read(part: SavedPart, at: int, nbytes: int, buffer: bytearray) -> torch.Tensor:
    part.read_into(at, memoryview(buffer)[:nbytes])
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes)


def _band(part: SavedPart, band: TensorBox, itemsize: int, buffer: bytearray) -> torch.Tensor:
    """The bytes of a band, of whose rows the part may have more than is asked for."""
    row_bytes = _row_bytes(part.box, itemsize)
    at = (band.offsets[0] - part.box.offsets[0]) * row_bytes
    rows = _read(part, at, band.shape[0] * row_bytes, buffer)
    found = rows.view(band.shape[0], *part.box.shape[1:], itemsize)
    for dim in range(1, len(band.shape)):
        begin = band.offsets[dim] - part.box.offsets[dim]
        found = found.narrow(dim, begin, band.shape[dim])
    return found.contiguous().view(-1)
