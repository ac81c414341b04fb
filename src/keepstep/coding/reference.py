"""Reference: arithmetic of GF(256), plainly, and the code it gives; slow where it touches data.

The field is the one ISA-L uses (x^8 + x^4 + x^3 + x^2 + 1), so both give the same bytes: the fast
code is tested against this one, and this one stands in where the library is missing. Small matrices
are inverted here in either case.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview
Rows = tuple[bytes, ...]
POLYNOMIAL = 0x11D


def _powers() -> tuple[list[int], list[int]]:
    exponent, logarithm, value = [0] * 510, [0] * 256, 1
    for power in range(255):
        exponent[power] = exponent[power + 255] = value
        logarithm[value] = power
        value = (value << 1) ^ (POLYNOMIAL if value & 0x80 else 0)
    return exponent, logarithm


EXPONENT, LOGARITHM = _powers()  # of the generator 2


def multiply(a: int, b: int) -> int:
    return EXPONENT[LOGARITHM[a] + LOGARITHM[b]] if a and b else 0


def inverse(a: int) -> int:
    assert a, "zero has no inverse"
    return EXPONENT[255 - LOGARITHM[a]]


def matrix_product(a: Rows, b: Rows) -> Rows:
    return tuple(bytes(_dot(row, column) for column in zip(*b, strict=True)) for row in a)


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    total = 0
    for x, y in zip(a, b, strict=True):
        total ^= multiply(x, y)
    return total


def matrix_inverse(rows: Rows) -> Rows:
    """By Gauss and Jordan. The matrix must have an inverse: every square part of a Cauchy matrix
    has."""
    size = len(rows)
    work = [list(row) + [int(i == j) for j in range(size)] for i, row in enumerate(rows)]
    for column in range(size):
        pivot = next(i for i in range(column, size) if work[i][column])
        work[column], work[pivot] = work[pivot], work[column]
        scale = inverse(work[column][column])
        work[column] = [multiply(scale, x) for x in work[column]]
        for i in range(size):
            factor = work[i][column]
            if i != column and factor:
                work[i] = [
                    x ^ multiply(factor, y) for x, y in zip(work[i], work[column], strict=True)
                ]
    return tuple(bytes(row[size:]) for row in work)


def add_product(coefficient: int, source: Buffer, target: Buffer) -> None:
    """target += coefficient * source, over the length of the source."""
    import numpy as np

    into: NDArray[Any] = np.frombuffer(target, np.uint8, count=len(source))
    into ^= _products()[coefficient][np.frombuffer(source, np.uint8)]


@lru_cache(maxsize=1)
def _products() -> NDArray[np.uint8]:
    import numpy as np

    return np.array([[multiply(a, b) for b in range(256)] for a in range(256)], np.uint8)
