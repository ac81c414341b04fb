"""Buddy check: of two that differ the checked one alone tells and ends, and none where gradients
never were the same."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.edge.torch.buddy import Found
from keepstep.errors import CorruptionError
from keepstep.runtime.rank.job.buddy_check import BuddyCheck
from tests.runtime.fakes import FakeJournal

RANKS = (0, 3, 999, 1000, 1001)
CHECKED = int("1000")  # a number of its own, as one that was received


def check_of(rank: int) -> tuple[BuddyCheck, FakeJournal]:
    journal, nothing = FakeJournal(), None
    driven: Any = nothing
    return BuddyCheck(driven, rank, journal, lambda call: None), journal


def found(*names: str) -> Found:
    return Found(7, CHECKED, 3, names, 2)


@pytest.mark.parametrize("rank", RANKS)
def test_whose_gradient_differs_ends(rank: int) -> None:
    check, journal = check_of(rank)
    check.buddy_heard(found())
    if rank != CHECKED:
        check.buddy_heard(found("w"))
        assert journal.events == []
        return
    with pytest.raises(CorruptionError, match="rank 1000 in step 7"):
        check.buddy_heard(found("w"))
    [told] = journal.of("gradient-differs")
    assert told.data == {"step": 7, "rank": 1000, "ranks": [1000, 3]}


@pytest.mark.parametrize("rank", RANKS)
def test_where_gradients_are_never_the_same_nobody_is_accused_and_that_is_told_once(
    rank: int,
) -> None:
    check, journal = check_of(rank)
    check.buddy_heard(found("w"))
    assert journal.kinds == ["not-repeatable"] * (rank == CHECKED)
    assert check.buddy_pair(2) is None, "none are checked any more"
