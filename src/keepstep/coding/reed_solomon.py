"""Reed-Solomon: any t lost blocks of a codeword from any k that remain, in place, at memory speed.

Comes in: positions (0..k-1 are data, k..k+t-1 parity) and buffers. Goes out: the wanted blocks,
written where the caller says. The work is done by ISA-L's `ec_encode_data`, called on the buffers
as they lie, with the GIL released. PyPI's `pyeclib` wheel carries the library (`pip install
keepstep[rs]`); without it `coding/reference.py` computes the same bytes, slowly.

The code is systematic with a Cauchy matrix, so every k positions determine all others. With t = 1
the parity is the plain XOR, which needs no library. A source shorter than a target continues as
zeros.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from keepstep.coding import reference
from keepstep.coding.reference import Buffer, Rows
from keepstep.coding.xor import xor_into, xor_of
from keepstep.model.units import GIB

log = logging.getLogger("keepstep")

CALL_BYTES = GIB  # of a buffer in one call: ISA-L counts bytes in an int


@lru_cache(maxsize=1024)
def solve(k: int, t: int, have: tuple[int, ...], want: tuple[int, ...]) -> Rows:
    """One row for each wanted position: its coefficients over the k positions in `have`."""
    assert len(set(have)) == k and max(have + want) < k + t, (
        f"{have} for {want} in a code of {k} + {t}"
    )
    rows = _generator(k, t)
    return reference.matrix_product(
        tuple(rows[p] for p in want), reference.matrix_inverse(tuple(rows[p] for p in have))
    )


def _generator(k: int, t: int) -> Rows:
    """Every position over the data: the identity above the parity rows."""
    identity = tuple(bytes(int(i == j) for j in range(k)) for i in range(k))
    if t == 1:
        return (*identity, bytes([1]) * k)
    return identity + tuple(
        bytes(reference.inverse(i ^ j) for j in range(k)) for i in range(k, k + t)
    )


def rebuild(rows: Rows, sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
    """targets[i] = sum of rows[i][j] * sources[j]. Targets overlap neither each other nor a
    source."""
    given, wanted = _views(sources), _views(targets)
    if _is_xor(rows):
        for target in wanted:
            xor_of(target, [source[: len(target)] for source in given])
        return
    for start, stop in _stretches([*given, *wanted], max(len(target) for target in wanted)):
        reaching = [j for j, source in enumerate(given) if len(source) >= stop]
        reached = [i for i, target in enumerate(wanted) if len(target) >= stop]
        part = tuple(bytes(rows[i][j] for j in reaching) for i in reached)
        _multiply(
            part, [given[j][start:stop] for j in reaching], [wanted[i][start:stop] for i in reached]
        )


def accumulate(rows: Rows, index: int, source: Buffer, targets: Sequence[Buffer]) -> None:
    """targets[i] += rows[i][index] * source: for sources that arrive one by one, in any order, into
    targets that began as zeros."""
    (given,), wanted = _views([source]), _views(targets)
    for start, stop in _stretches(
        [given, *wanted], min(len(given), max(len(target) for target in wanted))
    ):
        reached = [i for i, target in enumerate(wanted) if len(target) >= stop]
        _add(
            bytes(rows[i][index] for i in reached),
            given[start:stop],
            [wanted[i][start:stop] for i in reached],
        )


def _views(buffers: Sequence[Buffer]) -> list[memoryview]:
    return [memoryview(buffer).cast("B") for buffer in buffers]


def _is_xor(rows: Rows) -> bool:
    return all(coefficient == 1 for row in rows for coefficient in row)


def _stretches(buffers: Sequence[memoryview], length: int) -> Iterator[tuple[int, int]]:
    """From 0 to `length`, so that within a stretch every buffer is either all there or not at
    all."""
    ends = {min(len(buffer), length) for buffer in buffers} | {
        *range(CALL_BYTES, length, CALL_BYTES),
        length,
    }
    return pairwise(sorted(ends | {0}))


def _multiply(rows: Rows, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    library = isal()
    if library is not None and sources:
        tables = _tables(rows)
        library.ec_encode_data(
            len(targets[0]),
            len(sources),
            len(targets),
            tables,
            _pointers(sources),
            _pointers(targets),
        )
        return
    for row, target in zip(rows, targets, strict=True):
        xor_into(target, [target])  # zero
        for coefficient, source in zip(row, sources, strict=True):
            reference.add_product(coefficient, source, target)


def _add(column: bytes, source: memoryview, targets: Sequence[memoryview]) -> None:
    if set(column) == {1}:
        for target in targets:
            xor_into(target, [source])
    elif (library := isal()) is None:
        for coefficient, target in zip(column, targets, strict=True):
            reference.add_product(coefficient, source, target)
    else:
        tables = _tables(tuple(bytes([coefficient]) for coefficient in column))
        library.ec_encode_data_update(
            len(source), 1, len(targets), 0, tables, _address(source), _pointers(targets)
        )


@lru_cache(maxsize=1)
def isal() -> ctypes.CDLL | None:
    """ISA-L, from pyeclib's wheel or the system; None, and one warning, when there is none."""
    spec = importlib.util.find_spec("pyeclib")
    beside = Path(spec.origin).parents[1] if spec and spec.origin else None
    bundled = sorted(beside.glob("pyeclib.libs/libisal*.so*")) if beside else []
    name = str(bundled[0]) if bundled else ctypes.util.find_library("isal")
    if name is None:
        log.warning(
            "Reed-Solomon runs without ISA-L and is some 50 times slower: pip install "
            "'keepstep[rs]'"
        )
        return None
    return ctypes.CDLL(name)


@lru_cache(maxsize=1024)
def _tables(rows: Rows) -> ctypes.Array[ctypes.c_char]:
    library = isal()
    assert library is not None and rows[0]
    tables = ctypes.create_string_buffer(32 * len(rows) * len(rows[0]))
    library.ec_init_tables(len(rows[0]), len(rows), b"".join(rows), tables)
    return tables


def _pointers(buffers: Sequence[memoryview]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(buffers))(*map(_address, buffers))


def _address(buffer: memoryview) -> ctypes.c_void_p:
    import numpy as np

    return ctypes.c_void_p(np.frombuffer(buffer, np.uint8).ctypes.data)
