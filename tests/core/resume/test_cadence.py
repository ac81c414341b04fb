"""Cadence: ranks whose captures take longer than a step still hold a common one, and soon."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.resume.cadence import Cadence, at_most_lost_steps, is_due
from keepstep.core.resume.cut import Holding, common, cut, hopeless
from keepstep.core.resume.slots import Skip, choose
from keepstep.model.snapshot import SlotState, SlotView, Stamp

EMPTY = SlotView(SlotState.EMPTY, Stamp(-1, 0))


@dataclass
class Capturing:
    """A rank as the others see it. Time is counted in steps."""

    slots: list[SlotView] = field(default_factory=lambda: [EMPTY, EMPTY])
    cadence: Cadence = field(default_factory=Cadence)
    decided_step: int = -1
    seals_at: float = 0.0

    @property
    def holding(self) -> Holding:
        sealed = frozenset(v.stamp for v in self.slots if v.state is SlotState.SEALED)
        writing = [v.stamp for v in self.slots if v.state is SlotState.WRITING]
        return Holding(sealed, writing[0] if writing else None, self.decided_step)

    def seal(self, now: float) -> None:
        if now < self.seals_at:
            return
        for index, view in enumerate(self.slots):
            if view.state is SlotState.WRITING:
                self.slots[index] = SlotView(SlotState.SEALED, view.stamp)

    def boundary(self, step: int, duration: float, job: Job) -> None:
        is_writing = any(v.state is SlotState.WRITING for v in self.slots)
        self.cadence.boundary(step, is_writing)
        decision = choose(self.slots, job.horizon, job.is_hopeless)
        self.decided_step = step
        if isinstance(decision, Skip) or not is_due(step, job.period_steps):
            return
        self.cadence.begins(step)
        self.slots[decision.slot] = SlotView(SlotState.WRITING, Stamp(step, 1))
        self.seals_at = step + duration


class Job:
    """Ranks that train in step: what each of them sees is what all showed a moment ago."""

    def __init__(self, ranks: int) -> None:
        self.ranks = [Capturing() for _ in range(ranks)]
        self.look()

    def look(self) -> None:
        self.holdings = list({rank.holding for rank in self.ranks})
        self.horizon = max(common([h.sealed for h in self.holdings]), default=None)
        spans = [rank.cadence.span_steps for rank in self.ranks]
        self.period_steps = max(spans) if len(spans) > 1 else 1

    def is_hopeless(self, stamp: Stamp) -> bool:
        return hopeless(stamp, self.holdings, len(self.ranks))

    @property
    def restorable_step(self) -> int:
        found = cut([rank.holding for rank in self.ranks], len(self.ranks))
        return -1 if found is None else found.step

    def run(self, durations: list[list[float]]) -> list[int]:
        """`durations`: by step and rank, of the capture that begins there. How many completed steps
        a kill just before the end of each step would have cost."""
        lost = []
        for step, of_ranks in enumerate(durations):
            self.look()
            for rank, duration in zip(self.ranks, of_ranks, strict=True):
                rank.boundary(step, duration, self)
            lost.append(step - self.restorable_step)
            for rank in self.ranks:
                rank.seal(step + 1 - 1e-9)
        return lost


RANKS = pytest.mark.parametrize("ranks", [1, 2, 8, 1024])
CAPTURE_STEPS = pytest.mark.parametrize("capture", [0.4, 1.4, 2.9, 7.2])


def settled_losses(ranks: int, longest: int, durations: list[list[float]]) -> list[int]:
    """Without the first captures, which nobody has measured yet."""
    return Job(ranks).run(durations)[4 * longest :]


@RANKS
@CAPTURE_STEPS
def test_captures_of_one_length_cost_less_than_two_periods(ranks: int, capture: float) -> None:
    period = math.ceil(capture)
    durations = [[capture] * ranks for _ in range(12 * period)]
    lost = settled_losses(ranks, period, durations)
    assert max(lost) <= at_most_lost_steps(period)


@RANKS
@CAPTURE_STEPS
def test_captures_that_vary_cost_one_period_more_when_one_misses_its_turn(
    ranks: int, capture: float
) -> None:
    chance = random.Random(f"{ranks}/{capture}")
    period = math.ceil(capture)
    durations = [
        [capture * (0.6 + 0.4 * chance.random()) for _ in range(ranks)]
        for _ in range((8 if ranks == 1024 else 40) * period)
    ]
    lost = settled_losses(ranks, period, durations)
    assert max(lost) <= at_most_lost_steps(period) + period


@given(st.integers(0, 10_000), st.integers(2, 6), st.floats(0.1, 6.0), st.floats(0.0, 0.6))
def test_a_straggler_sets_the_pace(seed: int, ranks: int, capture: float, jitter: float) -> None:
    chance = random.Random(seed)
    slow = chance.randrange(ranks)
    durations = [
        [
            capture * (1 + jitter * chance.random()) * (1.5 if rank == slow else 1.0)
            for rank in range(ranks)
        ]
        for _ in range(120)
    ]
    period = math.ceil(max(max(row) for row in durations))
    lost = settled_losses(ranks, period, durations)
    assert max(lost) <= at_most_lost_steps(period) + period


def test_ranks_of_different_speed_agree() -> None:
    """By their own clocks these would hardly ever begin at the same step."""
    spans = [2 + rank % 3 for rank in range(8)]
    durations = [[span - 0.5 for span in spans] for _ in range(100)]
    assert max(settled_losses(8, 4, durations)) <= at_most_lost_steps(4)


@given(
    st.lists(st.integers(1, 9), min_size=5, max_size=30), st.integers(0, 29), st.integers(50, 99)
)
def test_one_hiccup_changes_nothing(spans: list[int], where: int, hiccup: int) -> None:
    def told(durations: list[int]) -> int:
        cadence, step = Cadence(), 0
        for span in durations:
            cadence.begins(step)
            step += span
            cadence.boundary(step, is_writing=False)
        return cadence.span_steps

    steady = [4] * 10
    assert told(steady) == 4
    steady[where % 10] = hiccup
    assert told(steady) == 4
    assert 1 <= told(spans) <= max(spans)


def test_a_capture_that_has_not_ended_is_not_counted() -> None:
    cadence = Cadence()
    assert cadence.span_steps == 1
    cadence.begins(3)
    cadence.boundary(4, is_writing=True)
    assert cadence.span_steps == 1
    cadence.boundary(5, is_writing=False)
    cadence.boundary(9, is_writing=False)
    assert cadence.span_steps == 2


def test_a_period_of_nothing_is_every_step() -> None:
    assert is_due(7, 0) and is_due(7, 1) and not is_due(7, 2)
