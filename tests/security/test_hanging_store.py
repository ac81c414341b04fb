"""A store that hangs while a checkpoint is written: a training that is over does not wait for ever,
and says what is not stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.core.resume.patience import FIRST_STANDSTILL_NS
from keepstep.testing.rough_store import RoughStore
from tests.security.training import Training, command, stored, until


@pytest.mark.soak  # it is given two minutes
@pytest.mark.timeout(400)
def test_a_writer_that_stands_still_is_told_of_and_replaced(
    rough: RoughStore, tmp_path: Path
) -> None:
    training = Training(tmp_path / "1", rough.url, **rough.environ(tmp_path), KEEPSTEP_GRACE_S="60")
    rough.behave("stops", "PUT ")
    training.start(3)
    (stopped, _), *_ = until(rough.met, "the persister, in the middle of its checkpoint")
    told = training.wait_for("persister-stuck")
    assert f"process {stopped}" in told.why and "the store does not answer" in told.why
    code, shown = command("status", "--job", "t", **training.environ)
    assert code == 0 and "the store does not answer" in shown, shown

    code, said = training.end(within_s=FIRST_STANDSTILL_NS / 1e9 + 30)
    assert code == 1 and "step, 2, is not in the store" in said, said
    assert stored(rough.directory) == []
    code, said = training.train(3)
    assert code == 0 and stored(rough.directory) == [2], said
    assert len(training.events("keeper-started")) == 1, "it is the persister that was replaced"
