"""Whoever else is there: strangers at keepers' ports, another run on the same store. Seeds as the
swarm has them, with each kind in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.sim.protocol.job.plan import Beside, beside, small
from keepstep.sim.protocol.swarm import run, story


def test_a_run_of_yesterday_that_restarts_from_its_memory_stays_of_yesterday() -> None:
    """It took its successor's checkpoints for older ones, and removed them: both had begun epoch 2,
    one from the store, one from its memory."""
    outcome = run(190, replace(beside(small(190), "yesterday"), strangers=False))
    assert outcome.wrong is None, story(outcome)


@pytest.mark.parametrize("kind", ["another", "races", "adopts", "yesterday"])
def test_two_runs_on_one_store(kind: Beside) -> None:
    outcome = run(28, replace(beside(small(28), kind), strangers=False))
    assert outcome.wrong is None, story(outcome)


def test_strangers_change_nothing() -> None:
    outcome = run(1, replace(small(1), strangers=True))
    assert outcome.wrong is None, story(outcome)
