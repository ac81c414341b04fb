"""A store that does not answer when a job starts whose memory is gone: nobody starts afresh over
checkpoints that nobody could look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.testing.rough_store import RoughStore
from tests.security.training import Training, stored, until

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("about", [".distcp", ".metadata", "LIST "])
def test_one_time_out_takes_no_job_back_to_step_0(
    about: str, rough: RoughStore, tmp_path: Path
) -> None:
    """There is one checkpoint, of step 9, and the first request for it, or for a list of all there
    is, goes unanswered."""
    training = Training(tmp_path / "1", rough.url, **rough.environ(tmp_path))
    code, said = training.train(10)
    assert code == 0 and stored(rough.directory) == [9], said
    training.lose()
    rough.behave("fails", about, once=True)
    code, said = training.train(12)
    assert len(rough.met()) == 1, "nothing of what this is about was asked for"
    assert code == 0 and [event.data["step"] for event in training.events("restored")] == [9], said


@pytest.mark.parametrize("about", ["keepstep.json", ".distcp", "step-000000000003"])
def test_what_fails_is_tried_again_and_the_job_goes_on(
    about: str, rough: RoughStore, tmp_path: Path
) -> None:
    """Whether it is a manifest or the data that cannot be read, or all of the newest checkpoint
    alone: an older one, that can be, is no reason to go back."""
    training = Training(tmp_path / "1", rough.url, **rough.environ(tmp_path))
    code, said = training.train(4, EVERY="2")
    assert code == 0 and stored(rough.directory) == [3, 1], said
    training.lose()
    rough.behave("fails", about)
    training.start(6)
    until(lambda: len(rough.met()) >= 2, "a second look at a store that fails")
    assert training.process.poll() is None
    rough.heal()
    code, said = training.end()
    assert code == 0 and [event.data["step"] for event in training.events("restored")] == [3], said
    assert stored(rough.directory)[0] == 5


def test_who_waits_for_a_store_that_hangs_is_told_and_starts_when_it_answers(
    rough: RoughStore,
    tmp_path: Path,
) -> None:
    training = Training(tmp_path / "1", rough.url, **rough.environ(tmp_path))
    code, said = training.train(3)
    assert code == 0, said
    training.lose()
    rough.behave("hangs", "LIST ")
    training.start(5)
    told = training.wait_for("store-unreachable").why
    assert "nobody starts before it does" in told and "given up after 300 s" in told
    rough.heal()
    code, said = training.end()
    assert code == 0 and "the store has not answered for" in said, said
    assert [event.data["step"] for event in training.events("restored")] == [2]
