"""A leader of yesterday: what stood still over a checkpoint while its successor wrote others, and
goes on, removes nothing of theirs and overwrites nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from keepstep.edge.store.store import Store
from keepstep.testing.rough_store import RoughStore
from tests.security.training import Training, inspect, stored, until


def test_who_wakes_over_its_checkpoint_removes_and_overwrites_nothing(
    rough: RoughStore, tmp_path: Path
) -> None:
    """Stopped with all files written, in front of the manifest: of step 3, after one of step 1. The
    successor, on another machine, has written steps 3 to 11, and keeps two."""
    old = Training(tmp_path / "old", rough.url, **rough.environ(tmp_path), EVERY="2")
    old.start(20, held=3)
    old.hold()
    rough.behave("stops", "keepstep.json.tmp")
    old.go_on()
    pid, _ = until(rough.met, "the persister, in the middle of its checkpoint")[0]
    assert stored(rough.directory) == [1]

    new = Training(tmp_path / "new", rough.url, **rough.environ(tmp_path), EVERY="2")
    code, said = new.train(12)
    assert code == 0, said
    assert [event.data["step"] for event in new.events("restored")] == [1]
    assert stored(rough.directory) == [11, 9]
    theirs = {
        path: path.read_bytes()
        for manifest in Store(rough.directory).list_checkpoints().checkpoints
        for path in Path(Store(rough.directory).url(manifest.name)).iterdir()
    }

    os.kill(pid, signal.SIGCONT)
    code, said = old.end()
    assert code != 0 and "a later run of this job went on from step 1" in said, said
    assert {event.data["step"] for event in old.events("persist-failed")} == {3}
    assert {path: path.read_bytes() for path in theirs} == theirs
    assert stored(rough.directory) == [11, 9], "what the old one wrote does not count"
    code, found = inspect(str(rough.directory))
    assert code == 0 and "damaged" not in found, found
