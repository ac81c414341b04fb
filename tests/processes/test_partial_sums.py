"""Ranks that do not wait for the slowest: what they come to is what their record says, bit for bit,
also where one of them is killed; local steps come to what an undisturbed run comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.runtime.rank.job.partial_sums import RECORD
from tests.processes.test_run import until
from tests.processes.trainings import Training

pytestmark = [pytest.mark.timeout(400), pytest.mark.soak]
RANKS, SLOW = 3, 1
SLOWLY = ("--slow-rank", str(SLOW), "--slow-from", "5", "--factor", "3")
USUAL = ("--steps", "60", "--compute-ms", "8")


def ends(training: Training) -> list[tuple[str, list[int]]]:
    """By rank, the hash of its state and where its random numbers are."""
    return [(one["hash"], one["random"]) for one in training.ended()]


def step_of(training: Training, rank: int) -> int:
    status = training.status(rank)
    return -1 if status is None else status.step


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    trainings: list[Training] = []

    def begin(*given: str) -> Training:
        home = tmp_path / str(len(trainings))
        trainings.append(Training(home, "partial_job", RANKS, *USUAL, *given))
        return trainings[-1]

    yield begin
    for training in trainings:
        training.end()


def test_the_record_played_back_ends_in_the_same_bits(train: Callable[..., Training]) -> None:
    """Rank 0, which writes the record, and the one that is late, are killed."""
    live = train("--late", "add", *SLOWLY)
    for killed, at in ((0, 18), (SLOW, 36)):
        until(lambda step=at: step_of(live, 2) >= step, f"{at} steps", 120)
        live.kill(killed)
    ended = ends(live)
    assert len(live.told("restored")) >= 2, "ranks were killed for nothing"
    assert live.told("left-out"), "nobody was late"
    assert len({hashed for hashed, _ in ended}) == 1, "ranks are equal"
    played = train("--late", "add", "--replay", str(live.state_dir / RECORD))
    assert ends(played) == ended


def test_local_steps_end_in_the_bits_of_an_undisturbed_run(train: Callable[..., Training]) -> None:
    way = ("--way", "local", "--every", "4")
    usual = ends(train(*way))
    assert len({hashed for hashed, _ in usual}) == RANKS, "moments are each rank's own"
    disturbed = train(*way, *SLOWLY)
    until(lambda: step_of(disturbed, 0) >= 25, "25 steps", 120)
    disturbed.kill(2)
    assert ends(disturbed) == usual
    assert disturbed.told("restored"), "a rank was killed for nothing"
