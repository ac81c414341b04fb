"""Runs in one store: what a fresh start leaves behind stays, and is not taken."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from keepstep.edge.store.runs import RUN
from keepstep.edge.store.store import Store
from keepstep.model.checkpoint import CheckpointName, StoreListing
from tests.edge.store.test_store import SMALL, steps, write


def opened(kind: str, room: Path) -> Store:
    if kind == "memory":
        return Store(f"memory://{uuid.uuid4().hex}", fs=MemoryFileSystem())
    return Store(room / "store")


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_another_run_begins_empty_and_the_one_before_is_kept(kind: str, tmp_path: Path) -> None:
    store = opened(kind, tmp_path)
    for number in range(1, 4):
        assert steps(store.follow()) == []
        write(store, 5, SMALL, wall_ns=number)
        write(store, 9, SMALL, wall_ns=number)
        where = store.begin_run()
        assert where is not None and where.endswith(f"run-{number + 1:06d}")
        assert store.begin_run() is None, "nothing has been written in this one"
    firsts = Store(store._base, fs=store._fs)
    assert steps(firsts) == [9, 5] and firsts.read_manifest(5).wall_ns == 1
    second = Store(f"{store._base}/run-000002", fs=store._fs)
    assert steps(second) == [9, 5] and second.read_manifest(5).wall_ns == 2
    assert firsts.look() == StoreListing([]), "asked about the newest run"


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_run_that_was_never_quite_begun_is_none(kind: str, tmp_path: Path) -> None:
    store = opened(kind, tmp_path)
    write(store, 5, SMALL)
    store._fs.makedirs(f"{store._base}/run-000002")
    store._fs.pipe_file(f"{store._base}/run-000002/{RUN}.tmp", b"torn")
    assert store.look() == StoreListing([5], epochs={5: 0})
    assert store.begin_run() is not None and store.look() == StoreListing([])


def test_an_attempt_stays_in_the_run_in_which_it_began(tmp_path: Path) -> None:
    writer, leaver = Store(tmp_path), Store(tmp_path)
    write(writer.follow(), 5, SMALL)
    with writer.draft(CheckpointName(7)) as draft:
        leaver.begin_run()
        assert writer.url(7) == str(tmp_path / "step-000000000007")
        draft.abandon()
    assert writer.follow().url(7) == str(tmp_path / "run-000002" / "step-000000000007")


@pytest.mark.parametrize("name", [RUN, f"{RUN}.tmp"])
def test_a_link_where_a_run_is_to_begin_is_not_followed(tmp_path: Path, name: str) -> None:
    """Whoever may write to the store could lead it to any file of the trainer's user."""
    store = opened("disk", tmp_path)
    write(store, 5, SMALL)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"mine")
    run = tmp_path / "store" / "run-000002"
    run.mkdir()
    (run / name).symlink_to(elsewhere)
    store.begin_run()
    assert elsewhere.read_bytes() == b"mine"
