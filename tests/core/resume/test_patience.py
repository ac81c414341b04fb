"""Patience with a store: it ends, and it asks ever less."""

from __future__ import annotations

from keepstep.core.resume.patience import (
    IN_ALL_NS,
    MOST_NS,
    StorePatience,
    pause_before,
)
from keepstep.model.units import S_NS


def test_questions_come_ever_later_and_come_to_an_end() -> None:
    patience, now_ns, pauses = StorePatience(0), 0, []
    while (pause_ns := patience.next_try_after_ns(now_ns)) is not None:
        pauses.append(pause_ns)
        now_ns += pause_ns
    assert pauses == sorted(pauses) and pauses[0] == S_NS and pauses[-1] == MOST_NS
    assert IN_ALL_NS - MOST_NS < now_ns <= IN_ALL_NS
    assert pause_before(10_000) == MOST_NS


def test_a_question_that_hangs_is_not_asked_beyond_the_end() -> None:
    assert StorePatience(0).next_try_after_ns(IN_ALL_NS) is None
