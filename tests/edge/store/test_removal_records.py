"""Removal records: one a number, whoever writes it, and no stranger's."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.edge.store.manifest import FORMAT_VERSION, seal
from keepstep.edge.store.signer import Signer
from keepstep.edge.store.store import Store
from keepstep.model.removal import RemovalRecord

RECORD = RemovalRecord(1, 3, "one", is_held=True)


def test_a_number_has_one_record_and_the_highest_counts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.removal_record() is None
    assert store.put_removal_record(RECORD) and store.removal_record() == RECORD
    assert not store.put_removal_record(RemovalRecord(1, 4, "other", is_held=True))
    assert store.removal_record() == RECORD
    given_back = RemovalRecord(2, 3, "one", is_held=False)
    assert store.put_removal_record(given_back) and store.removal_record() == given_back
    assert [path.name for path in tmp_path.iterdir()] == ["keepstep-removals-000000000002.json"]


@pytest.mark.parametrize("says", ["torn", "unsigned", "another number", "another's"])
def test_what_does_not_prove_is_passed_over(tmp_path: Path, says: str) -> None:
    store = Store(tmp_path, signer=Signer("the job's secret"))
    assert store.put_removal_record(RECORD)
    theirs = RemovalRecord(9, 77, "a stranger", is_held=True)
    path = tmp_path / "keepstep-removals-000000000009.json"
    match says:
        case "torn":
            path.write_bytes(b"{")
        case "unsigned":
            assert Store(tmp_path).put_removal_record(theirs)
        case "another number":
            path.write_bytes((tmp_path / "keepstep-removals-000000000001.json").read_bytes())
        case _:
            other = Store(tmp_path, signer=Signer("another secret"))
            assert other.put_removal_record(theirs)
    assert store.removal_record() == RECORD and store.look().epoch == 3


@pytest.mark.parametrize("body", [{}, {"number": -1}, {"number": 1, "epoch": "x"}, {"number": []}])
def test_odd_records_are_passed_over(tmp_path: Path, body: dict[str, object]) -> None:
    raw = seal({"format": FORMAT_VERSION, **body})
    (tmp_path / "keepstep-removals-000000000001.json").write_bytes(raw)
    assert Store(tmp_path).removal_record() is None


def test_another_run_has_records_of_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.draft(store.named(1)) as draft, draft.open("a") as file:
        file.write(b"half")
        assert store.put_removal_record(RECORD)
        assert store.begin_run() is not None
    assert store.removal_record() is None and store.is_newest_run()
    first = Store(tmp_path)
    assert first.removal_record() == RECORD and not first.is_newest_run()
