"""Reed-Solomon: the library, the reference and the definition give the same bytes; any k of k + t
give back the rest."""

from __future__ import annotations

import ctypes
import logging
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.coding import reed_solomon
from keepstep.coding.reed_solomon import accumulate, isal, rebuild, solve
from keepstep.coding.reference import Rows, multiply

needs_isal = pytest.mark.skipif(
    isal() is None, reason="ISA-L is not installed: pip install pyeclib"
)


@pytest.fixture(params=["isal", "reference"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "reference":
        with patch.object(reed_solomon, "isal", lambda: None):
            yield "reference"
    elif isal() is None:
        pytest.skip("ISA-L is not installed: pip install pyeclib")
    else:
        yield "isal"


def plainly(rows: Rows, sources: list[bytes], lengths: list[int]) -> list[bytes]:
    """The definition, one byte at a time."""
    results = []
    for row, length in zip(rows, lengths, strict=True):
        result = bytearray(length)
        for coefficient, source in zip(row, sources, strict=True):
            for i, value in enumerate(source[:length]):
                result[i] ^= multiply(coefficient, value)
        results.append(bytes(result))
    return results


@st.composite
def work(draw: st.DrawFn) -> tuple[Rows, list[bytes], list[int]]:
    """A code, which k positions there are and which are wanted, and sources and targets of any
    lengths."""
    k, t = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    order = draw(st.permutations(range(k + t)))
    want = draw(st.integers(1, t))
    rows = solve(k, t, tuple(order[:k]), tuple(order[k : k + want]))
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    sources = [
        rng.randbytes(n) for n in draw(st.lists(st.integers(0, 200), min_size=k, max_size=k))
    ]
    return rows, sources, draw(st.lists(st.integers(0, 220), min_size=want, max_size=want))


tasks = given(task=work(), call=st.sampled_from([7, 64, 1 << 30]))


def check(task: tuple[Rows, list[bytes], list[int]], call: int) -> None:
    rows, sources, lengths = task
    expected = plainly(rows, sources, lengths)
    targets = [bytearray(b"\xa5" * length) for length in lengths]
    with patch.object(reed_solomon, "CALL_BYTES", call):
        rebuild(rows, sources, targets)
        assert [bytes(target) for target in targets] == expected
        # The same, source by source and in another order.
        targets = [bytearray(length) for length in lengths]
        for index in reversed(range(len(sources))):
            accumulate(rows, index, sources[index], targets)
        assert [bytes(target) for target in targets] == expected


@needs_isal
@tasks
@settings(max_examples=300)
def test_the_library_does_what_the_definition_says(
    task: tuple[Rows, list[bytes], list[int]], call: int
) -> None:
    check(task, call)


@tasks
def test_without_the_library_the_reference_does(
    task: tuple[Rows, list[bytes], list[int]], call: int
) -> None:
    with patch.object(reed_solomon, "isal", lambda: None):
        check(task, call)


@pytest.mark.parametrize(("k", "t"), [(1, 1), (3, 1), (2, 2), (4, 2), (4, 3), (8, 2), (5, 4)])
def test_any_k_blocks_give_back_all_others(engine: str, k: int, t: int) -> None:
    rng = random.Random(k * 100 + t)
    data = [rng.randbytes(96) for _ in range(k)]
    parity = [bytearray(96) for _ in range(t)]
    rebuild(solve(k, t, tuple(range(k)), tuple(range(k, k + t))), data, parity)
    word = [*data, *map(bytes, parity)]
    for have in combinations(range(k + t), k):
        want = tuple(p for p in range(k + t) if p not in have)
        found = [bytearray(96) for _ in want]
        rebuild(solve(k, t, have, want), [word[p] for p in have], found)
        assert [bytes(f) for f in found] == [word[p] for p in want], have


@needs_isal
@pytest.mark.parametrize(("k", "t"), [(2, 2), (4, 2), (10, 4), (200, 55)])
def test_the_matrix_is_the_one_of_the_library(k: int, t: int) -> None:
    library = isal()
    assert library is not None
    theirs = ctypes.create_string_buffer((k + t) * k)
    library.gf_gen_cauchy1_matrix(theirs, k + t, k)
    assert theirs.raw[k * k :] == b"".join(solve(k, t, tuple(range(k)), tuple(range(k, k + t))))


@given(st.lists(st.integers(0, 1000), max_size=4), st.integers(0, 1000), st.integers(1, 300))
def test_a_stretch_fits_into_one_call_and_ends_where_a_buffer_does(
    lengths: list[int], length: int, call: int
) -> None:
    with patch.object(reed_solomon, "CALL_BYTES", call):
        stretches = list(reed_solomon._stretches([memoryview(bytes(n)) for n in lengths], length))
    assert [x for start, stop in stretches for x in range(start, stop)] == list(range(length))
    assert all(0 < stop - start <= call for start, stop in stretches)
    assert not any(start < n < stop for start, stop in stretches for n in lengths)


def test_a_missing_library_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    isal.cache_clear()
    try:
        with (
            patch("importlib.util.find_spec", return_value=None),
            patch("ctypes.util.find_library", return_value=None),
            caplog.at_level(logging.WARNING, "keepstep"),
        ):
            assert isal() is None and isal() is None
        assert [record.message for record in caplog.records] == [
            "Reed-Solomon runs without ISA-L and is some 50 times slower: pip install "
            "'keepstep[rs]'"
        ]
    finally:
        isal.cache_clear()


def test_importing_it_costs_no_numpy() -> None:
    """The keeper imports the codes; a job without parity does not pay for numpy."""
    code = "import sys, keepstep.coding.reed_solomon; print('numpy' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
        ).stdout
        == "False\n"
    )
