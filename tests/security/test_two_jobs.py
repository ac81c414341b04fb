"""Two jobs with one store: neither takes or removes what is the other's."""

from __future__ import annotations

from pathlib import Path

from keepstep.edge.store.store import Store
from tests.security.training import Training, inspect


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
