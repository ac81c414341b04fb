"""GF(256) against multiplication by hand: shift, add, reduce."""

from __future__ import annotations

import random

from keepstep.coding.reference import (
    POLYNOMIAL,
    add_product,
    inverse,
    matrix_inverse,
    matrix_product,
    multiply,
)


def by_hand(a: int, b: int) -> int:
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(14, 7, -1):
        if product >> bit & 1:
            product ^= POLYNOMIAL << (bit - 8)
    return product


def test_every_product() -> None:
    assert all(multiply(a, b) == by_hand(a, b) for a in range(256) for b in range(256))


def test_every_inverse() -> None:
    assert all(by_hand(a, inverse(a)) == 1 for a in range(1, 256))


def test_matrices_times_their_inverse_are_the_identity() -> None:
    rng = random.Random(7)
    for size in range(1, 12):
        # a Cauchy matrix: all sums of two different elements are not zero
        xs = rng.sample(range(256), 2 * size)
        cauchy = tuple(bytes(inverse(x ^ y) for y in xs[size:]) for x in xs[:size])
        identity = tuple(bytes(int(i == j) for j in range(size)) for i in range(size))
        assert matrix_product(cauchy, matrix_inverse(cauchy)) == identity
    swapped = (bytes([0, 1]), bytes([1, 0]))  # a pivot that is not on the diagonal
    assert matrix_inverse(swapped) == swapped


def test_a_product_is_added_over_the_length_of_its_source() -> None:
    target = bytearray([9, 9, 9])
    add_product(3, bytes([7, 255]), target)
    assert target == bytes([9 ^ by_hand(3, 7), 9 ^ by_hand(3, 255), 9])
