"""Supervision: an agent that dies is followed by another one, but nobody follows a last word, a
row of short lives, or one that was to end before it began; and one that stays stopped is killed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.recovery.supervision import (
    KILLED_AFTER_LOOKS,
    MAX_SHORT_LIVES,
    SHORT_LIFE_NS,
    Supervision,
    predecessor,
)
from keepstep.model.launch import Predecessor

LIVED_NS = st.integers(0, 2 * SHORT_LIFE_NS)


@given(st.integers(0, 255), st.none() | st.just(15), LIVED_NS)
def test_an_agent_that_ends_before_it_takes_part_says_how(
    code: int, signum: int | None, lived_ns: int
) -> None:
    assert Supervision().exit_code(code, None, signum, lived_ns, attempt=-1) == code


@given(st.integers(-64, 255), st.none() | st.integers(0, 255), st.none() | st.integers(1, 64))
def test_one_that_dies_is_followed_unless_the_end_was_said(
    code: int, last_word: int | None, signum: int | None
) -> None:
    """Killed, or of an error of its own: its ranks live on, and where a signal was to end it the
    other nodes may not know of that."""
    found = Supervision().exit_code(code, last_word, signum, SHORT_LIFE_NS, attempt=0)
    assert found == last_word


@given(st.integers(-64, -1), st.integers(1, 64), LIVED_NS)
def test_one_that_was_to_end_before_it_took_part_is_not_followed(
    code: int, signum: int, lived_ns: int
) -> None:
    assert Supervision().exit_code(code, None, signum, lived_ns, attempt=-1) == 128 + signum


@pytest.mark.parametrize(
    ("code", "signum", "expected"), [(-9, None, 137), (1, None, 1), (-9, 15, 143), (1, 15, 143)]
)
@given(lives=st.lists(LIVED_NS, max_size=20))
def test_short_lives_in_a_row_are_no_accident(
    code: int, signum: int | None, expected: int, lives: list[int]
) -> None:
    supervision, row = Supervision(), 0
    for lived_ns in lives:
        row = row + 1 if lived_ns < SHORT_LIFE_NS else 0
        found = supervision.exit_code(code, None, signum, lived_ns, attempt=0)
        assert (found == expected) == (row >= MAX_SHORT_LIVES)
        if found is not None:
            return
        assert found is None


@given(
    st.lists(st.tuples(st.integers(1, 99), st.integers(-1, 5)), min_size=1, max_size=9),
    st.none() | st.just(15),
)
def test_nothing_that_may_still_run_is_forgotten(
    lives: list[tuple[int, int]], signum: int | None
) -> None:
    told: Predecessor | None = None
    for pid, attempt in lives:
        told = predecessor(told, pid, attempt, signum)
    took_part = [i for i, (_, attempt) in enumerate(lives) if attempt >= 0]
    since = took_part[-1] if took_part else 0
    newest = lives[since][1]
    assert told == Predecessor(tuple(pid for pid, _ in lives[since:]), newest, signum or 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2 * KILLED_AFTER_LOOKS)), max_size=9))
def test_who_is_stopped_at_so_many_looks_in_a_row_is_killed_and_nobody_else(
    spans: list[tuple[bool, int]],
) -> None:
    supervision, row = Supervision(), 0
    for is_stopped, looks in spans:
        for _ in range(looks):
            row = row + 1 if is_stopped else 0
            is_due = row > 0 and row % KILLED_AFTER_LOOKS == 0
            assert supervision.is_to_be_killed(is_stopped) == is_due
