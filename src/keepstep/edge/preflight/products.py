"""Products: matrix products repeated on every core and compared bit by bit.

A core that computes wrong does so for some operands and now and then ("Cores that don't count",
HotOS 2021; "Silent Data Corruptions at Scale", arXiv:2102.11245). So each core of this process
computes the same products of several kinds of operands, by itself and in one thread, again and
again; all must agree with the first core's. A product of whole numbers is checked against the
operands too (Freivalds, 1977: (A B) x = A (B x), exact here), so that a machine whose cores are all
wrong in the same way is found.

Two results agree where their bits do, or where both are not a number: what is in a NaN besides is
the hardware's own business. A comparison by value, which holds no NaN equal to anything, would find
too much, and one by difference, which holds a NaN near everything, nothing.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from keepstep.model.units import S_NS

KINDS = ("normal", "wide", "whole", "special")
LARGEST_WHOLE = 1024


@dataclass(frozen=True, slots=True)
class WrongProduct:
    """`core` None: all cores agree, and the product does not fit its operands."""

    core: int | None
    kind: str
    repetition: int
    elements: int


@dataclass(frozen=True, slots=True)
class ProductFigures:
    """`speeds`: floating-point operations a second of one thread's processor time, the best of each
    core; what other processes take does not count, a low clock does."""

    speeds: tuple[int, ...]
    wrong: WrongProduct | None


def check_products(size: int, repetitions: int, seed: int = 0) -> ProductFigures:
    """On every core that this process may use. The thread's cores are as before afterwards."""
    cores = sorted(os.sched_getaffinity(0))
    operands = [(kind, *operands_of(kind, size, seed)) for kind in KINDS]
    references: dict[str, Any] = {}
    speeds: list[int] = []
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            best = 0
            for repetition in range(repetitions):
                for kind, left, right in operands:
                    begun_ns = time.thread_time_ns()
                    product = multiply(left, right)
                    took_ns = max(1, time.thread_time_ns() - begun_ns)
                    best = max(best, 2 * size**3 * S_NS // took_ns)
                    reference = references.setdefault(kind, product)
                    wrong = differing(reference, product)
                    if wrong:
                        return ProductFigures(
                            tuple(speeds), WrongProduct(core, kind, repetition, wrong)
                        )
                    if kind == "whole" and not fits(left, right, product):
                        return ProductFigures(
                            tuple(speeds), WrongProduct(None, kind, repetition, 1)
                        )
            speeds.append(best)
    finally:
        os.sched_setaffinity(0, cores)
    return ProductFigures(tuple(speeds), None)


def multiply(left: Any, right: Any) -> Any:
    """The product under test."""
    with np.errstate(all="ignore"):
        return left @ right


def operands_of(kind: str, size: int, seed: int = 0) -> tuple[Any, Any]:
    """Two square matrices of float32; whole: of float64. normal: as weights and activations are;
    wide: of all magnitudes, subnormal ones among them; whole: small whole numbers, whose product is
    exact; special: with infinities and NaN in places."""
    random = np.random.default_rng([seed, KINDS.index(kind)])
    shape = (2, size, size)
    pair: Any
    if kind == "whole":
        pair = random.integers(-LARGEST_WHOLE, LARGEST_WHOLE, shape).astype(np.float64)
    else:
        pair = random.standard_normal(shape, dtype=np.float32)
        if kind == "wide":
            pair *= np.float32(2.0) ** random.integers(-70, 60, shape).astype(np.float32)
        elif kind == "special":
            rows = random.integers(0, size, 8)
            pair[0, rows[:3], rows[3:6]] = np.inf
            pair[1, rows[6], rows[7]] = np.nan
    return pair[0], pair[1]


def differing(one: Any, other: Any) -> int:
    """How many elements differ in their bits, and are not both NaN."""
    bits = np.uint32 if one.dtype == np.float32 else np.uint64
    unequal = one.view(bits) != other.view(bits)
    both_nan = np.isnan(one) & np.isnan(other)
    return int(np.count_nonzero(unequal & ~both_nan))


def fits(left: Any, right: Any, product: Any) -> bool:
    """Freivalds' check, with a vector of ones and minus ones: sums stay below 2^53."""
    size = len(left)
    signs = np.where(np.random.default_rng(size).integers(0, 2, size), 1, -1).astype(np.int64)
    whole = [matrix.astype(np.int64) for matrix in (left, right, product)]
    return bool(np.array_equal(whole[2] @ signs, whole[0] @ (whole[1] @ signs)))


def can_see() -> bool:
    """The canary: a flipped bit, a NaN that came and one that went are seen, and equal products are
    not."""
    left, right = operands_of("special", 32)
    product = multiply(left, right)
    flipped, came = product.copy(), product.copy()
    finite = np.argwhere(np.isfinite(product))
    if len(finite) == 0:
        return False
    place = tuple(finite[0])
    flipped.view(np.uint32)[place] ^= 1
    came[place] = np.nan
    went = came.copy()
    went[place] = 0.0
    return (
        differing(product, product.copy()) == 0
        and differing(product, flipped) == 1
        and differing(product, came) == 1
        and differing(came, went) == 1
        and differing(came, came.copy()) == 0
    )
