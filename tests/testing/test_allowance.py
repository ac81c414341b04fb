"""Allowance: no rank does a step that was not allowed, whenever it asks and however late it is
told."""

from __future__ import annotations

import threading
from pathlib import Path

from keepstep.testing.allowance import Allowance, allow


def test_all_end_behind_the_same_step(tmp_path: Path) -> None:
    path, done = tmp_path / "until.json", [0, 0, 0]
    allow(path, 5)
    reached = threading.Barrier(4, timeout=20)

    def train(rank: int) -> None:
        allowance = Allowance(path)
        step = 0
        while allowance.covers(step):
            done[rank] = step = step + 1
            if step == 5:
                reached.wait()

    ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    reached.wait()
    assert done == [5, 5, 5]  # and they wait
    allow(path, 9)
    allow(path, 12, final=True)
    for rank in ranks:
        rank.join(20)
    assert done == [12, 12, 12]


def test_a_rank_that_comes_back_hears_the_same(tmp_path: Path) -> None:
    allow(tmp_path / "until.json", 3, final=True)
    for _ in range(2):
        allowance = Allowance(tmp_path / "until.json")
        assert [allowance.covers(step) for step in (0, 2, 3)] == [True, True, False]
