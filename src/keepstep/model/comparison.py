"""Comparison: what is said of two states, tensor by tensor.

Values only. What a saved tensor is of stands in its `TensorKind`; where a part of it lies within
the whole, in a `TensorBox`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

VALUE = "value"  # in a dtype's place: no tensor, but pickled bytes, which are never unpickled


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A part of a tensor: where it begins in each dimension, and how far it reaches."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: TensorBox) -> TensorBox | None:
        """What lies in both; None when nothing does. Both are of tensors of one shape."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self._ends(), other._ends()))
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return TensorBox(begins, shape) if all(length > 0 for length in shape) else None

    def _ends(self) -> tuple[int, ...]:
        return tuple(at + length for at, length in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The type of a saved tensor and its whole shape, of which its state may have a part only."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_value(self) -> bool:
        return self.dtype == VALUE

    @property
    def is_weight(self) -> bool:
        """Whether training is expected to change it at every step."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def __str__(self) -> str:
        if self.is_value:
            return f"a value of {self.shape[0]} bytes"
        return f"{self.dtype}{list(self.shape)}"


class Likeness(Enum):
    """Of two tensors of one name. APART: they are parts of one tensor that have nothing in
    common."""

    EQUAL = 0
    DIFFERENT = 1
    ONLY_A = 2
    ONLY_B = 3
    SHAPE = 4
    DTYPE = 5
    APART = 6


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors of one kind differ.

    differing: how many values have other bytes; -0.0 and 0.0 do, and NaNs of other bits.
    unlike: of those, how many are not finite on a side. All other numbers leave them out.
    max_abs, the norms (Euclidean): None where the type has no numbers.
    """

    values: int
    differing: int
    unlike: int = 0
    max_abs: float | None = None
    norm_a: float | None = None
    norm_b: float | None = None
    norm_difference: float | None = None

    @property
    def drift(self) -> float | None:
        """The norm of the difference relative to that of the first."""
        if self.norm_difference is None or self.norm_a is None:
            return None
        if self.norm_a == 0:
            return math.inf if self.norm_difference else 0.0
        return self.norm_difference / self.norm_a


@dataclass(frozen=True, slots=True)
class TensorFinding:
    """What is said of one name. `a`, `b`: what it is in the first and in the second state."""

    name: str
    verdict: Likeness
    a: TensorKind | None = None
    b: TensorKind | None = None
    difference: Difference | None = None
