"""What a SIGTERM says and does: with a store, and without one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.runtime.rank.job.checkpoint_requests import CheckpointRequests
from tests.runtime.fakes import FakeJournal


class Rank:
    """See `Rank`. Whatever it asks for is answered at once."""

    def __init__(self, step: int, answer: CheckpointDone) -> None:
        self.step, self.answer = step, answer
        self.asked: list[tuple[int | None, bool]] = []

    def persist(
        self, step: int | None, why: str, answered: Callable[[CheckpointDone], None], follow: bool
    ) -> None:
        self.asked.append((step, follow))
        answered(self.answer)


def told(step: int, answer: CheckpointDone, kept_s: float | None) -> tuple[list[str], Rank]:
    rank, journal = Rank(step, answer), FakeJournal()
    driver: Any = SimpleNamespace(changed=threading.Condition())
    unused: Any = None
    CheckpointRequests(rank, 0, driver, unused, journal, kept_s).preempted()  # type: ignore[arg-type]
    return [event.why for event in journal.of("preempted")], rank


@pytest.mark.parametrize("ok", [True, False])
def test_with_a_store_the_step_and_what_became_of_it_are_told(ok: bool) -> None:
    (first, last), rank = told(7, CheckpointDone(0, ok, 6, "1 MiB written"), None)
    assert "to the store (7 or one just before it); the process ends then" in first
    end = "step 6 is in the store" if ok else "nothing is in the store"
    assert last == f"SIGTERM is answered: {end}: 1 MiB written"
    assert rank.asked == [(None, False)], "it is urgent: no steps follow"


def test_before_the_first_step_none_is_promised() -> None:
    nothing = CheckpointDone(0, False, None, "no step is held by every rank")
    (first, _), _ = told(-1, nothing, None)
    assert "(none is completed yet)" in first


@pytest.mark.parametrize(
    ("step", "said"), [(7, "memory is kept for 60 s: the same command goes on"), (-1, "no step is")]
)
def test_without_a_store_it_is_told_how_long_memory_is_kept(step: int, said: str) -> None:
    (only,), rank = told(step, CheckpointDone(0, True, 7, ""), 60.0)
    assert said in only and rank.asked == []
