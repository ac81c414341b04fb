"""Numbers: what is said of two tensors whose bytes differ, window by window.

Comes in: the bytes of both, window by window. Goes out: a `Difference`. Everything is computed in
64-bit floats, a chunk that fits a core's cache at a time. What is not finite on a side counts as
`unlike` where the bytes differ, and is left out of every other number.
"""

from __future__ import annotations

import math

import torch

from keepstep.edge.shm import memory
from keepstep.model.comparison import Difference, TensorKind

CHUNK_VALUES = 1 << 17
_LONG = (torch.int64, torch.uint64)  # more digits than a 64-bit float has


class DifferenceSums:
    """Of one pair of tensors."""

    def __init__(self, kind: TensorKind) -> None:
        self._dtype = torch.uint8 if kind.is_value else getattr(torch, kind.dtype)
        self._has_numbers = not kind.is_value and _has_numbers(self._dtype)
        self._values = self._differing = self._unlike = 0
        self._squares_a = self._squares_b = self._squares = self._max_abs = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Two windows of bytes, of whole values."""
        itemsize = self._dtype.itemsize
        for at in range(0, a.numel(), CHUNK_VALUES * itemsize):
            x, y = (t[at : at + CHUNK_VALUES * itemsize] for t in (a, b))
            self._values += x.numel() // itemsize
            if memory.equal(x.data_ptr(), y.data_ptr(), x.numel()):
                self._add_equal(x)
            else:
                self._add_different(x, y)

    def difference(self) -> Difference:
        if not self._has_numbers:
            return Difference(self._values, self._differing)
        return Difference(
            self._values,
            self._differing,
            self._unlike,
            self._max_abs,
            math.sqrt(self._squares_a),
            math.sqrt(self._squares_b),
            math.sqrt(self._squares),
        )

    def _add_equal(self, both: torch.Tensor) -> None:
        if self._has_numbers:
            squares = _squares(_floats(both, self._dtype))
            self._squares_a += squares
            self._squares_b += squares

    def _add_different(self, a: torch.Tensor, b: torch.Tensor) -> None:
        differs = (a != b).view(-1, self._dtype.itemsize).any(dim=1)
        self._differing += int(differs.sum())
        if not self._has_numbers:
            return
        x, y = _floats(a, self._dtype), _floats(b, self._dtype)
        self._squares_a += _squares(x)
        self._squares_b += _squares(y)
        is_finite = (x.isfinite() & y.isfinite()).view(len(differs), -1).all(dim=1)
        self._unlike += int((differs & ~is_finite).sum())
        apart = _apart(a, b, x, y, self._dtype).view(len(differs), -1)[differs & is_finite]
        if apart.numel():
            lengths = torch.linalg.vector_norm(apart, dim=1)  # of a complex number's two parts
            self._max_abs = max(self._max_abs, float(lengths.max()))
            self._squares += float(lengths @ lengths)


def _has_numbers(dtype: torch.dtype) -> bool:
    try:
        _floats(torch.zeros(dtype.itemsize, dtype=torch.uint8), dtype)
    except (RuntimeError, TypeError):  # of packed, quantized and bits types nobody computes
        return False
    return True


def _floats(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values; a complex one as its two parts."""
    if dtype is torch.bool:
        return raw.ne(0).double()
    if dtype is torch.complex32:
        return raw.view(torch.float16).double()
    values = raw.view(dtype)
    return torch.view_as_real(values).double().view(-1) if dtype.is_complex else values.double()


def _apart(
    a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """b less a. Long integers are subtracted in halves, so that neighbours stay apart."""
    if dtype not in _LONG:
        return y - x
    (low_a, high_a), (low_b, high_b) = (_halves(t, dtype) for t in (a, b))
    return (high_b - high_a).double() * 2.0**32 + (low_b - low_a).double()


def _halves(raw: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    bits = raw.view(torch.int64)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    return low, high & 0xFFFFFFFF if dtype is torch.uint64 else high


def _squares(values: torch.Tensor) -> float:
    found = float(values @ values)
    if math.isfinite(found):
        return found
    finite = values[values.isfinite()]
    return float(finite @ finite)
