"""Two jobs with one store: neither takes or removes what is the other's."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.edge.store.store import Store
from tests.security.training import Training, inspect

pytestmark = pytest.mark.timeout(200)


def test_another_job_is_refused_and_who_adopts_removes_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = Training(tmp_path / "1", str(store), "first")
    code, said = first.train(4, EVERY="2")
    assert code == 0, said
    theirs = {path: path.read_bytes() for path in store.rglob("step-*/*")}
    assert {m.step for m in Store(store).published()} == {1, 3}

    second = Training(tmp_path / "2", str(store), "second")
    code, said = second.train(4)
    assert code != 0 and "found those of 'first'" in said and "--adopt" in said
    assert not second.events("restored")

    code, said = second.train(12, KEEPSTEP_ADOPT="1", EVERY="2")
    assert code == 0, said
    assert [event.data["step"] for event in second.events("restored")] == [3]
    assert {m.step for m in Store(store).published() if m.job == "second"} == {9, 11}
    assert {path: path.read_bytes() for path in theirs} == theirs
    assert inspect(str(store))[0] == 0


def test_other_arguments_and_another_submission_are_the_same_job(tmp_path: Path) -> None:
    """Without a name given: the state that waits in memory is found, and the name is told."""
    training = Training(tmp_path / "1", str(tmp_path / "store"), KEEPSTEP_GRACE_S="300")
    training.environ = {k: v for k, v in training.environ.items() if k != "KEEPSTEP_JOB"}
    training.start(8, held=4, SLURM_JOB_ID="1")
    training.hold()
    training.process.kill()
    training.end()
    code, said = training.train(6, SLURM_JOB_ID="2")
    (name,) = (path.name for path in (training.room / "state").iterdir())
    assert code == 0 and "goes on with the run before: resumed step 3 from memory" in said, said
    assert f"job {name} (KEEPSTEP_JOB or --job names another)" in said
