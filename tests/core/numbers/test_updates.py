"""Updates: what is due comes in turn, and a difference accuses only where the same came before."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.numbers.repeats import MARGIN
from keepstep.core.numbers.updates import (
    BLOCK_ELEMENTS,
    CALIBRATION,
    CALIBRATIONS,
    UpdateJudge,
    due_pieces,
    probability,
)
from keepstep.model.numbers import UpdateOutcome

sizes = st.lists(st.integers(0, 9 * BLOCK_ELEMENTS), max_size=6)


@given(sizes, st.integers(0, 12 * BLOCK_ELEMENTS), st.integers(0, 50))
def test_a_turn_takes_no_more_than_it_may_and_nothing_twice(
    elements: list[int], most: int, turn: int
) -> None:
    pieces = due_pieces(elements, most, turn)
    assert sum(p.end - p.begin for p in pieces) <= max(most, BLOCK_ELEMENTS)
    for piece in pieces:
        assert piece.begin % BLOCK_ELEMENTS == 0 and piece.begin < piece.end
        assert piece.end <= elements[piece.tensor]
    places = [(p.tensor, n) for p in pieces for n in range(p.begin, p.end, BLOCK_ELEMENTS)]
    assert len(places) == len(set(places))


@given(sizes, st.integers(1, 12 * BLOCK_ELEMENTS), st.integers(0, 50))
def test_all_elements_come_in_turn(elements: list[int], most: int, begin: int) -> None:
    turns = math.ceil(
        sum(-(-n // BLOCK_ELEMENTS) for n in elements) / max(1, most // BLOCK_ELEMENTS)
    )
    seen = [set[int]() for _ in elements]
    for turn in range(begin, begin + turns):
        for piece in due_pieces(elements, most, turn):
            seen[piece.tensor].update(range(piece.begin, piece.end, BLOCK_ELEMENTS))
    assert [len(blocks) for blocks in seen] == [-(-n // BLOCK_ELEMENTS) for n in elements]


def test_the_table_of_the_documentation() -> None:
    mib = 1 << 18  # elements of four bytes
    found = [probability(mib, n * mib, every) for n in (1, 100, 10_000) for every in (1, 8)]
    assert found == [1.0, 0.125, 0.01, 0.00125, 0.0001, 0.0000125]


def learnt(*apart: float) -> UpdateJudge:
    judge = UpdateJudge()
    for value in apart:
        assert judge.heard(value, ()) is UpdateOutcome.LEARNS
    return judge


def test_what_comes_to_the_same_bits_has_to() -> None:
    judge = learnt(*[0.0] * CALIBRATION)
    assert judge.is_calibrated and "the same bits" in judge.why
    assert judge.heard(0.0, ()) is UpdateOutcome.FITS
    assert judge.heard(1e-9, (1e-9, 1e-9)) is UpdateOutcome.DIFFERS
    assert judge.heard(1e-9, (1e-9, 0.0)) is UpdateOutcome.ERRED


def test_what_differs_a_little_each_time_may_differ_by_some_more() -> None:
    judge = learnt(1e-6, 2e-6, 3e-6, 1e-6)
    assert judge.within == pytest.approx(3e-6 * MARGIN) and not judge.is_off
    assert judge.heard(judge.within, ()) is UpdateOutcome.FITS
    assert judge.heard(2 * judge.within, (1.0,)) is UpdateOutcome.DIFFERS


@pytest.mark.parametrize("apart", [(0.0, 0.0, 0.0, 1e-6), (0.5,) * 4, (math.inf,) * 4])
def test_where_it_cannot_be_known_nobody_is_accused(apart: tuple[float, ...]) -> None:
    """Of four, one that differs may be the first error; and what differs by much says nothing."""
    judge = learnt(*apart * CALIBRATIONS)
    assert judge.is_off and "unknown" in judge.why
    assert judge.heard(1.0, (1.0,)) is UpdateOutcome.OFF and judge.due([9], 9, 0) == ()


def test_an_error_while_it_learns_does_not_widen_what_is_allowed() -> None:
    judge = learnt(0.0, 1e-3, 0.0, 0.0)
    assert not judge.is_calibrated and judge.within == 0.0
    for _ in range(CALIBRATION):
        judge.heard(0.0, ())
    assert judge.is_calibrated and judge.within == 0.0 and not judge.is_off


def test_what_a_program_writes_from_the_beginning_is_no_error() -> None:
    still, writes = learnt(*[0.0] * CALIBRATION), UpdateJudge()
    assert not writes.stayed(is_same=False)
    for _ in range(CALIBRATION):
        writes.heard(0.0, ())
    assert [still.stayed(True), still.stayed(False)] == [False, True]
    assert [writes.stayed(True), writes.stayed(False)] == [False, False]
    still.give_up("it comes again")
    assert not still.stayed(False)
