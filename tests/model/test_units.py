"""Units: rounding and words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.units import (
    GIB,
    KIB,
    MIB,
    MS_NS,
    S_NS,
    counted,
    every,
    first_line,
    human_bytes,
    human_ns,
    round_up,
)


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_rounding_up_is_the_smallest_multiple_that_holds_it(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0 and value <= rounded < value + multiple


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (64 * MIB, "64.0 MiB"),
        (3 * GIB + GIB // 4, "3.2 GiB"),
        (1024 * GIB, "1.0 TiB"),
    ],
)
def test_bytes_for_people(count: int, words: str) -> None:
    assert human_bytes(count) == words


@pytest.mark.parametrize(
    ("duration_ns", "words"),
    [
        (0, "0 us"),
        (12_345, "12 us"),
        (MS_NS, "1.0 ms"),
        (12_340_000, "12.3 ms"),
        (90 * S_NS, "90.00 s"),
    ],
)
def test_durations_for_people(duration_ns: int, words: str) -> None:
    assert human_ns(duration_ns) == words


def test_a_sentence_has_room_for_the_first_line() -> None:
    assert first_line("ValueError: a\nb") == "ValueError: a"
    assert first_line("\n  a \r\nb") == "a"
    assert first_line("\n") == first_line("") == ""


def test_one_is_one_and_more_are_all() -> None:
    assert (every(1, "rank"), every(2, "rank")) == ("the only rank", "all 2 ranks")
    assert (counted(1, "rank"), counted(0, "rank")) == ("1 rank", "0 ranks")
