"""Device pace: a trainer that is ahead of its device waits for its last snapshot, and no longer
than the device has something to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from keepstep.ports import LiveState
from keepstep.runtime.rank.device_pace import wait_for_snapshot
from keepstep.runtime.rank.driver import Driver
from keepstep.runtime.rank.rank import Rank
from tests.runtime.fakes import RankRoom
from tests.runtime.rank.test_rank import Trainee


@pytest.fixture
def trainee(tmp_path: Path) -> Iterator[Trainee]:
    found = Trainee(RankRoom(tmp_path, ranks=2))
    yield found
    found.rank.abandon()


class Waits:
    """A driver that only counts, and what happens meanwhile."""

    def __init__(self, then: Callable[[int], object] = lambda waited: None) -> None:
        self.count, self._then = 0, then

    def call(self, act: Callable[[], bool]) -> bool:
        return act()

    def wait(self, until: Callable[[], bool], within_s: float) -> bool:
        self.count += 1
        assert self.count < 1000
        self._then(self.count)
        return until()


def waited(trainee: Trainee, then: Callable[[int], object] = lambda waited: None) -> int:
    driver = Waits(then)
    live: Any = trainee.room.live
    wait_for_snapshot(cast("Rank", trainee.rank), cast("Driver", driver), cast("LiveState", live))
    return driver.count


def with_a_snapshot_under_way(trainee: Trainee) -> Trainee:
    trainee.start()
    trainee.rank.begin_step()
    trainee.rank.end_step(False, True, 1000, None)
    trainee.room.trainer.run()
    trainee.rank.begin_step()
    return trainee


def test_without_a_device_nobody_waits(trainee: Trainee) -> None:
    assert waited(with_a_snapshot_under_way(trainee)) == 0


def test_it_waits_until_the_last_snapshot_is_sealed(trainee: Trainee) -> None:
    with_a_snapshot_under_way(trainee)
    trainee.room.live.behind = lambda: True
    assert waited(trainee, lambda count: trainee.room.settle() if count == 3 else None) == 3
    assert waited(trainee) == 0, "nothing is under way"


def test_a_device_that_has_nothing_to_do_is_not_made_to_wait(trainee: Trainee) -> None:
    with_a_snapshot_under_way(trainee)
    left = iter([True, True, False])
    trainee.room.live.behind = lambda: next(left)
    assert waited(trainee) == 2


def test_when_a_peer_is_lost_meanwhile_it_goes_on(trainee: Trainee) -> None:
    with_a_snapshot_under_way(trainee)
    trainee.room.live.behind = lambda: True
    assert waited(trainee, lambda count: trainee.lose_peer() if count == 2 else None) == 2


def test_a_step_that_is_not_to_be_captured_waits_for_nothing(trainee: Trainee) -> None:
    with_a_snapshot_under_way(trainee)
    trainee.room.live.behind = lambda: True
    trainee.rank._capture._commit_view.look = (  # type: ignore[method-assign]
        lambda epoch, look=trainee.rank._capture._commit_view.look: look(epoch)._replace(
            period_steps=2
        )
    )
    assert waited(trainee) == 0, "step 1"
