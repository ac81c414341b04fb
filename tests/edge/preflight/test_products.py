"""Matrix products that are compared bit by bit, NaN among them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from keepstep.edge.preflight import products
from keepstep.edge.preflight.products import (
    KINDS,
    check_products,
    differing,
    fits,
    multiply,
    operands_of,
)


def test_sound_cores_agree_and_keep_their_places() -> None:
    before = os.sched_getaffinity(0)
    figures = check_products(64, 2)
    assert figures.wrong is None and len(figures.speeds) == len(before)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_bit_that_flips_in_one_product_is_found(
    monkeypatch: pytest.MonkeyPatch, kind: str, nth: int
) -> None:
    """In whichever product, but for the first, which the others are compared with."""
    counts: dict[int, int] = {}
    wanted = operands_of(kind, 48)[0]

    def sometimes_wrong(left: Any, right: Any) -> Any:
        product = multiply(left, right)
        if left.dtype == wanted.dtype and np.array_equal(left, wanted, equal_nan=True):
            counts[0] = counts.get(0, 0) + 1
            if counts[0] == nth + 1:
                place = tuple(np.argwhere(np.isfinite(product))[-1])
                product.view(np.uint8).reshape(48, 48, -1)[place][0] ^= 1
        return product

    monkeypatch.setattr(products, "multiply", sometimes_wrong)
    wrong = check_products(48, 4).wrong
    assert wrong is not None and wrong.kind == kind
    assert (wrong.elements, wrong.repetition) == (1, nth)


def test_cores_that_are_all_wrong_alike_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def always_wrong(left: Any, right: Any) -> Any:
        product = multiply(left, right)
        product[3, 4] += 1
        return product

    monkeypatch.setattr(products, "multiply", always_wrong)
    wrong = check_products(48, 1).wrong
    assert wrong is not None and (wrong.core, wrong.kind) == (None, "whole")


def test_a_whole_product_fits_its_operands_and_a_changed_one_does_not() -> None:
    left, right = operands_of("whole", 64)
    product = multiply(left, right)
    assert fits(left, right, product)
    for place in [(0, 0), (63, 63), (7, 31)]:
        changed = product.copy()
        changed[place] += 1
        assert not fits(left, right, changed)


def test_nan_is_equal_to_nan_and_to_nothing_else() -> None:
    one = np.array([1.0, np.nan, np.inf, 0.0], dtype=np.float32)
    other = one.copy()
    other.view(np.uint32)[1] ^= 1  # another payload, not a number still
    assert np.isnan(other[1]) and differing(one, other) == 0
    assert differing(one, np.array([1.0, 2.0, np.inf, 0.0], dtype=np.float32)) == 1
    assert differing(one, np.array([np.nan, np.nan, np.inf, -0.0], dtype=np.float32)) == 2


def test_the_operands_are_of_their_kinds() -> None:
    special = multiply(*operands_of("special", 64))
    assert np.isnan(special).any() and np.isfinite(special).any()
    wide = operands_of("wide", 64)[0]
    sizes = np.abs(wide[wide != 0]).astype(np.float64)
    assert sizes.max() / sizes.min() > 2.0**80
    for kind in KINDS:
        again = operands_of(kind, 16)
        assert all(differing(a, b) == 0 for a, b in zip(operands_of(kind, 16), again, strict=True))


def test_the_canary_sees_and_notices_when_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.can_see()

    def by_value(one: Any, other: Any) -> int:  # blind to NaN
        with np.errstate(invalid="ignore"):
            return int((np.abs(one - other) > 0).sum())

    monkeypatch.setattr(products, "differing", by_value)
    assert not products.can_see()
