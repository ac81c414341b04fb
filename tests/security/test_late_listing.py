"""A store whose listing falls behind, as a mirror's may: a job goes on from an older checkpoint
than there was, and the newer ones, of a history that it has left, turn up again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.training import Training, stored

pytestmark = pytest.mark.timeout(200)


def test_what_the_job_has_gone_back_behind_is_not_gone_on_from(tmp_path: Path) -> None:
    store, hidden = tmp_path / "store", tmp_path / "hidden"
    training = Training(tmp_path / "1", str(store), KEEPSTEP_KEEP="latest:9")
    code, said = training.train(10, EVERY="2")
    assert code == 0 and stored(store) == [9, 7, 5, 3, 1], said
    training.lose()
    hidden.mkdir()
    for path in sorted(store.glob("step-*"))[2:]:
        path.rename(hidden / path.name)
    assert stored(store) == [3, 1]

    training.start(20, held=6, EVERY="5")
    training.hold()
    assert stored(store) == [4, 3, 1]
    training.lose()
    for path in hidden.iterdir():
        path.rename(store / path.name)
    code, said = training.train(20, EVERY="2")
    assert code == 0, said
    assert [event.data["step"] for event in training.events("restored")] == [3, 4]
    assert stored(store) == [*range(19, 4, -2), 4], "what is computed again is written again"
