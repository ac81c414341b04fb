"""Micro-batches of a job: shares are a part of the state, and all ranks say the same of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.errors import ConfigError
from keepstep.runtime.rank.job import micro_batches
from keepstep.runtime.rank.job.micro_batches import MicroBatches
from tests.runtime.fakes import FakeJournal

RANKS, TOTAL = 2, 8
SHARED = {"shares": [5, 3], "looks": [[10, 20]], "seed": 77}


class Room:
    """Rank 0 of two, whose peer tells what this test says. `shares`: of each step, this rank's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal = FakeJournal()
        self.peers: dict[int, Any] = {}  # what rank 1 tells otherwise, by place
        self.given: list[tuple[list[range], int]] = []
        run = SimpleNamespace(changes_buffers=False, take_ns=lambda: 10, run=self._run)
        monkeypatch.setattr(micro_batches, "micro_batch_run", lambda *_: run)
        monkeypatch.setattr(micro_batches, "tell_all", self._tell_all)
        protected: Any = SimpleNamespace(loaders=SimpleNamespace(add_beside=lambda *_: None))
        self.batches = MicroBatches(
            protected, 0, RANKS, self.journal, lambda: None, lambda count: None
        )

    def _run(self, step: int, work: Any, share: float, seed: int) -> Any:
        self.given.append((list(map(len, work)), seed))
        yield from ()

    def _tell_all(self, mine: tuple[Any, ...], ranks: int) -> list[tuple[Any, ...]]:
        theirs = [self.peers.get(at, value) for at, value in enumerate(mine)]
        return [mine, tuple(theirs)]

    def step(self, number: int, total: int = TOTAL) -> tuple[list[int], int]:
        list(self.batches.of_step(number, -1, total, None, True))
        return self.given[-1]


def test_shares_that_are_restored_while_it_runs_are_gone_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = Room(monkeypatch)
    assert room.step(0)[0] == [4, 4]
    room.batches.load_state_dict(SHARED)
    assert room.batches.state_dict() == SHARED
    assert room.step(1) == ([5, 3], 77)


def test_shares_that_are_restored_before_it_begins_are_begun_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = Room(monkeypatch)
    room.batches.load_state_dict(SHARED)
    assert room.batches.state_dict() == SHARED
    assert room.step(1) == ([5, 3], 77) and room.journal.events == []


def test_shares_of_another_number_are_told_of_and_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = Room(monkeypatch)
    room.batches.load_state_dict(SHARED)
    assert room.step(1, total=6)[0] == [3, 3]
    [told] = room.journal.of("caveat")
    assert "of another number of them" in told.why


def test_ranks_that_ask_for_different_numbers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch)
    room.peers[1] = 10
    with pytest.raises(ConfigError, match=r"found numbers \[8, 10\]"):
        room.step(0)
