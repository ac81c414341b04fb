"""Device release, as a rank does it: the acts run beside the trainer, who hears of a device that is
free, or why the process cannot stay, and never waits for an act that does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.core.recovery.device_release import ABORT_WITHIN_NS, OVERHEAD_NS
from keepstep.model.device import DeviceAnswer
from keepstep.runtime.rank.device_release import ReleaseUnderWay
from tests.runtime.fakes import RankRoom


class Waiting:
    """A rank's device, and what its trainer heard."""

    def __init__(self, home: Path, has_device: bool = True) -> None:
        self.room = RankRoom(home)
        self.room.groups.has_device = has_device
        self.release = ReleaseUnderWay(self.room.world, 0)
        self.heard: list[str | None] = []

    def wait(self) -> Waiting:
        self.release.when_free(self.heard.append)
        return self


@pytest.fixture
def waiting(tmp_path: Path) -> Waiting:
    return Waiting(tmp_path)


def test_without_a_device_nobody_waits(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path, has_device=False)
    waiting.release.lost()
    assert waiting.wait().heard == [None]
    assert waiting.room.groups.aborts == 0 and not waiting.room.journal.events


def test_it_begins_with_the_notice_and_not_with_the_trainer(waiting: Waiting) -> None:
    """Who may stand behind the very kernel that is to be aborted."""
    waiting.release.lost()
    waiting.room.aside.run()
    assert waiting.room.groups.aborts == 1 and waiting.heard == []
    waiting.wait()
    assert waiting.heard == [None]
    assert waiting.room.journal.kinds == ["device-release"]


def test_who_waits_hears_when_it_is_over(waiting: Waiting) -> None:
    waiting.release.lost()
    waiting.wait()
    assert waiting.heard == []
    waiting.room.aside.run()
    assert waiting.heard == [None]


def test_a_loss_that_nobody_told_begins_when_somebody_waits(waiting: Waiting) -> None:
    waiting.wait()
    waiting.room.aside.run()
    assert waiting.heard == [None] and waiting.room.groups.aborts == 1


def test_a_broken_context_is_told_as_such(waiting: Waiting) -> None:
    error = DeviceAnswer(error="CUDA error: unspecified launch failure")
    waiting.room.groups.answers.extend([error, error])
    waiting.wait()
    waiting.room.aside.run()
    [why] = waiting.heard
    assert why is not None and "this process cannot stay" in why and "unspecified launch" in why


def test_an_act_that_never_answers_ends_the_waiting(waiting: Waiting) -> None:
    waiting.wait()
    waiting.room.time.pass_ns(ABORT_WITHIN_NS + OVERHEAD_NS)
    [why] = waiting.heard
    assert why is not None and "aborting the communicators did not end within" in why
    waiting.room.aside.run()  # it answers after all
    assert len(waiting.heard) == 1


def test_after_a_second_loss_the_new_communicators_are_aborted_as_well(waiting: Waiting) -> None:
    waiting.wait()
    waiting.room.aside.run()
    waiting.release.lost()
    waiting.wait()
    assert waiting.heard == [None], "free of the first one is not free"
    waiting.room.aside.run()
    assert waiting.heard == [None, None] and waiting.room.groups.aborts == 2
    waiting.release.built()
    waiting.room.time.pass_ns(ABORT_WITHIN_NS * 10)
    assert len(waiting.heard) == 2
