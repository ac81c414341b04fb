"""Ranks that share micro-batches by speed end in the state of a training in which nobody was slow,
also where one of them is killed meanwhile.

How much sooner depends on the machine: `benchmarks/shared_steps.py` measures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.test_run import until
from tests.processes.trainings import Training

pytestmark = [pytest.mark.timeout(400), pytest.mark.soak]
RANKS, SLOW = 2, 1
USUAL = ("--steps", "72", "--total", "8", "--micro-ms", "2")


def shared(home: Path, *given: str) -> Training:
    return Training(home, "shared_job", RANKS, *USUAL, *given)


def hashes(training: Training) -> list[str]:
    return [one["hash"] for one in training.ended()]


@pytest.fixture
def started() -> Iterator[list[Training]]:
    trainings: list[Training] = []
    yield trainings
    for training in trainings:
        training.end()


def test_the_state_is_that_of_a_training_in_which_nobody_was_slow(
    tmp_path: Path, started: list[Training]
) -> None:
    undisturbed = shared(tmp_path / "undisturbed")
    started.append(undisturbed)
    usual = set(hashes(undisturbed))
    assert len(usual) == 1, "replicas are equal"
    slow = ("--slow-rank", str(SLOW), "--slow-from", "8", "--factor", "6")
    disturbed = shared(tmp_path / "disturbed", *slow)
    started.append(disturbed)
    changed = until(lambda: disturbed.told("rebalanced"), "other shares", 150)[-1]
    assert sum(changed.data["shares"]) == 8 and changed.data["shares"][SLOW] < 4
    disturbed.kill(0)
    assert set(hashes(disturbed)) == usual
    assert disturbed.told("restored"), "a rank was killed for nothing"
