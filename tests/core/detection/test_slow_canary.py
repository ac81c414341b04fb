"""A judge of slow ranks proves that it can see, as it is made and as it judges, and learns nothing
of that; one that cannot is found."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import pytest

from keepstep.core.detection.drift import LEARNT_BLOCKS, Drift
from keepstep.core.detection.slow_canary import (
    KEPT_BLOCKS,
    flaw_of_fresh_judge,
    flaw_of_judge,
    usual_block,
)
from keepstep.core.detection.stragglers import BLOCK_STEPS, Stragglers, judge_of
from keepstep.model.step_work import Timing, WorkBlock
from tests.core.slow_steps import Steps

Seen = dict[int, deque[WorkBlock]]


def judged(run: Steps, steps: int, judge: Stragglers | None = None) -> tuple[Stragglers, Seen, int]:
    judge, seen, last = judge or Stragglers(), {}, 0
    for end, blocks in run.blocks(steps):
        judge.add(blocks, end)
        last = end
        for rank, block in blocks.items():
            seen.setdefault(rank, deque(maxlen=KEPT_BLOCKS)).append(block)
    return judge, seen, last


@pytest.mark.parametrize("timing", Timing)
def test_a_judge_as_it_is_made_sees_a_slow_rank(timing: Timing) -> None:
    assert flaw_of_fresh_judge(timing) == ""


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.25])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tells", [False, True])
def test_one_that_judges_sees_it_however_noisy_steps_are_and_goes_on_as_before(
    ranks: int, noise: float, tells: bool
) -> None:
    lengths = (0.25, 1.0) if tells else (1.0, 1.0)
    run = Steps(ranks, 7, noise, lengths, tells, rare=0.005, spread=0.08)
    for blocks in (LEARNT_BLOCKS + 2, 120):
        judge, seen, end = judged(run, blocks * BLOCK_STEPS)
        for turn in range(2):
            assert flaw_of_judge(judge, seen, end, turn) == "", (blocks, turn)
        assert judge.slow == {}


def test_one_that_has_named_a_slow_rank_sees_another() -> None:
    judge, seen, end = judged(Steps(4, 1, slow=2, factor=1.5), 600)
    assert set(judge.slow) == {2}
    for turn in range(4):
        assert flaw_of_judge(judge, seen, end, turn) == ""
    assert set(judge.slow) == {2}


def test_where_nobody_can_be_named_nothing_is_said() -> None:
    assert flaw_of_judge(*judged(Steps(1, 1), 600), 0) == ""
    assert flaw_of_judge(*judged(Steps(2, 1, noise=1.5), 600), 0) == "", "doubted already"


@pytest.mark.parametrize("broken", ["add", "rise"])
def test_a_judge_that_calls_nobody_slow_is_found(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    judge, seen, end = judged(Steps(2, 1), 400)
    assert flaw_of_judge(judge, seen, end, 0) == ""
    monkeypatch.setattr(Drift, broken, lambda *_: None)
    assert "does not see a slow one that is planted" in flaw_of_judge(judge, seen, end, 0)
    assert flaw_of_fresh_judge(Timing.HOST)


def test_one_that_has_learnt_to_see_nothing_is_found() -> None:
    """As when what it took for usual was far too much."""
    judge, seen, end = judged(Steps(2, 1), 400)
    for channel in judge._channels.values():
        assert channel.reference is not None
        channel.reference = channel.reference._replace(centre=9.0)
    assert flaw_of_judge(judge, seen, end, 0)


def test_what_is_shown_beside_it_is_what_ranks_usually_do() -> None:
    _, seen, _ = judged(Steps(2, 1), 100)
    usual = usual_block(seen[0])
    odd = seen[0][-1]._replace(own_ns=tuple(9 * ns for ns in usual.own_ns), throttled_ns=5)
    assert usual_block([*list(seen[0])[1:], odd]).own_ns < odd.own_ns
    assert usual_block([odd]).throttled_ns == 0 and usual.steps == BLOCK_STEPS


def test_it_costs_little() -> None:
    """Eight ranks, each with all the past that is kept, once in five minutes: less than a
    thousandth of a core."""
    judge, seen, end = judged(replace(Steps(8, 1), tells_tokens=True), 300 * BLOCK_STEPS)
    began = time.process_time()
    assert flaw_of_judge(judge, seen, end, 0) == ""
    assert time.process_time() - began < 0.3


def test_a_judge_of_data_alone_sees_a_rank_whose_data_is_slow() -> None:
    judge, seen, end = judged(Steps(2, 1), 400, judge_of(Timing.UNSEEN))
    assert flaw_of_judge(judge, seen, end, 1) == ""
