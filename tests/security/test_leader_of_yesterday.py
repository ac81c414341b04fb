"""A leader of yesterday: what stood still over a checkpoint while its successor wrote others, and
goes on, removes nothing of theirs and overwrites nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from keepstep.edge.store.store import Store
from keepstep.testing.rough_store import RoughStore
from tests.security.training import Training, inspect, stored, until

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(
    "at", [("keepstep.json.tmp",), ("GET ", "keepstep.json.tmp")], ids=["written", "read back"]
)
def test_who_wakes_over_its_checkpoint_removes_and_overwrites_nothing(
    at: tuple[str, ...], rough: RoughStore, tmp_path: Path
) -> None:
    """Stopped with all files written, in front of the manifest: of step 3, after one of step 1. The
    successor, on another machine, has written steps 3 to 11, step 3 among them, and keeps all; the
    one of yesterday would keep two."""
    old = Training(tmp_path / "old", rough.url, **rough.environ(tmp_path), EVERY="2")
    old.start(20, held=3)
    old.hold()
    rough.behave("stops", *at)
    old.go_on()
    pid, _ = until(rough.met, "the persister, in the middle of its checkpoint")[0]
    assert stored(rough.directory) == [1]

    new = Training(
        tmp_path / "new",
        rough.url,
        **rough.environ(tmp_path),
        EVERY="2",
        KEEPSTEP_KEEP="latest:9",
    )
    code, said = new.train(12)
    assert code == 0, said
    assert [event.data["step"] for event in new.events("restored")] == [1]
    counting = [11, 9, 7, 5, 3, 1]
    assert stored(rough.directory) == counting
    theirs = {
        path: path.read_bytes()
        for manifest in Store(rough.directory).list_checkpoints().checkpoints
        for path in Path(Store(rough.directory).url(manifest.name)).iterdir()
    }

    os.kill(pid, signal.SIGCONT)
    code, said = old.end()
    assert [path for path in theirs if not path.exists()] == [], "its successor's, removed"
    assert {path: path.read_bytes() for path in theirs} == theirs
    assert stored(rough.directory) == counting, "what the old one wrote does not count"
    verdict, found = inspect(str(rough.directory))
    assert verdict == 0 and "damaged" not in found, found
    assert code != 0, said
    overtaken = "a later run of this job went on from step 1"
    until(  # its keeper says so, as it tries once more: when the trainer may be gone
        lambda: [event for event in old.events("persist-failed") if overtaken in event.why],
        "that it is told why nothing of it counts",
    )
    assert {event.data["step"] for event in old.events("persist-failed")} == {3}


def test_who_wakes_as_it_removes_what_it_does_not_keep_removes_nothing(
    rough: RoughStore, tmp_path: Path
) -> None:
    """Stopped behind its checkpoint of step 3, as it was about to take the lease under which it
    removes step 1: it has decided that. The successor, on another machine, keeps all, and has
    removed nothing itself; it has said that it leads."""
    keeps_one = {"EVERY": "2", "KEEPSTEP_KEEP": "latest:1"}
    old = Training(tmp_path / "old", rough.url, **rough.environ(tmp_path), **keeps_one)
    old.start(20, held=3)
    old.hold()
    rough.behave("stops", "PUT ", "keepstep-removals-")
    old.go_on()
    pid, _ = until(rough.met, "the persister, about to remove")[0]
    assert stored(rough.directory) == [3, 1]

    new = Training(
        tmp_path / "new",
        rough.url,
        **rough.environ(tmp_path),
        EVERY="2",
        KEEPSTEP_KEEP="latest:9",
    )
    code, said = new.train(8)
    assert code == 0, said
    assert stored(rough.directory) == [7, 5, 3, 1]

    os.kill(pid, signal.SIGCONT)
    old.end()
    assert stored(rough.directory) == [7, 5, 3, 1]
