"""Buddies: everybody is checked, by everybody else, and a check that was never repeatable accuses
nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.detection.buddies import Repeatability, pair_of, probability, sentence


@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 9))
def test_everybody_is_checked_and_by_everybody_else_in_turn(
    size: int, every: int, epoch: int
) -> None:
    steps = range(0, every * size * (size - 1))
    pairs = [pair for step in steps if (pair := pair_of(step, epoch, size, every))]
    assert len(pairs) == len(set(pairs)) == size * (size - 1)
    assert all(one.checked != one.buddy and one.buddy < size for one in pairs)


@given(st.integers(0, 1000), st.integers(3, 6), st.integers(0, 9))
def test_in_the_next_life_another_buddy_checks_the_same_step(
    step: int, size: int, epoch: int
) -> None:
    one, again = pair_of(step, epoch, size, 1), pair_of(step, epoch + 1, size, 1)
    assert one is not None and again is not None
    assert one.checked == again.checked and one.buddy != again.buddy


@pytest.mark.parametrize(("step", "size", "every"), [(3, 2, 2), (4, 1, 1), (4, 3, 0)])
def test_nobody_is_checked(step: int, size: int, every: int) -> None:
    assert pair_of(step, 0, size, every) is None


def test_who_agreed_once_is_accused_when_it_does_not() -> None:
    here = Repeatability()
    assert not here.heard(True) and here.heard(False) and not here.is_off


def test_what_was_never_the_same_accuses_nobody_any_more() -> None:
    here = Repeatability()
    assert not here.heard(False) and here.is_off
    assert not here.heard(False)


def test_how_likely_a_wrong_rank_is_met() -> None:
    assert probability(1, 4, 1) == 0.25
    assert probability(100, 8, 50) == 50 / 800
    assert probability(1, 2, 9) == 1.0


def test_the_page_says_how_likely_it_is() -> None:
    """`docs/detection.md`: the table of sampling rates."""
    page = (Path(__file__).parents[3] / "docs/detection.md").read_text()
    rows = []
    for every in (1, 10, 100):
        for ranks in (4, 64, 1024):
            when = "step" if every == 1 else f"{every} steps"
            shares = [probability(every, ranks, wrong) for wrong in (1, 50)]
            told = ["1" if share == 1 else f"{100 * share:.3g} %" for share in shares]
            rows.append(f"| {when} | {ranks:,} | {told[0]} | {told[1]} |")
    assert "\n".join(["|---|---|---|---|", *rows, ""]) in page


@given(st.integers(1, 5), st.integers(2, 6), st.integers(1, 40))
def test_it_is_the_share_of_the_steps_with_which_it_may_begin(
    every: int, size: int, wrong_steps: int
) -> None:
    """The dumb way: each step in which a rank may begin to be wrong, in one round of turns."""
    span, rank = every * size, 1
    met = 0
    for begin in range(span):
        pairs = [pair_of(s, 0, size, every) for s in range(begin, begin + wrong_steps)]
        met += any(pair is not None and pair.checked == rank for pair in pairs)
    assert probability(every, size, wrong_steps) == met / span


def test_both_are_named() -> None:
    said = sentence(7, 2, 0, ["0.weight"], 4)
    assert "rank 2 in step 7" in said and "rank 0 finds" in said and "0.weight (1 of 4" in said
