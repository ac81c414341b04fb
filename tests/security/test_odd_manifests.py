"""Whoever can write to the store has put odd things where manifests or checkpoints are: no keeper
dies of one, the job goes on from the newest checkpoint that is whole, and writes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from keepstep.edge.store.manifest import seal
from keepstep.edge.store.owner import OWNER
from tests.security.training import Training, inspect, stored

HUGE = json.dumps({"format": 1, "step": 905, "files": {"a": {"bytes": 10**4000}}}).encode()
ODD: dict[int, Callable[[Path], object]] = {
    901: lambda path: path.write_bytes(seal({"format": 1, "step": 901})),
    902: lambda path: path.write_bytes(b'{"format":1,"step":902}'),
    903: lambda path: path.write_bytes(b"[" * 100_000),
    904: lambda path: path.write_bytes(seal({"format": 1, "step": 2**70, "epoch": 1e308})),
    905: lambda path: path.write_bytes(HUGE),
    906: lambda path: path.write_bytes(b"\xff\xfe\x00" * 100),
    907: lambda path: path.write_bytes(b""),
    908: lambda path: path.mkdir(),
    909: lambda path: os.mkfifo(path),
    910: lambda path: path.symlink_to("/dev/zero"),
}

NO_CHECKPOINT: dict[int, Callable[[Path], object]] = {
    911: lambda path: path.write_bytes(b""),
    912: lambda path: os.mkfifo(path),
    913: lambda path: path.symlink_to(path),
}


def test_no_keeper_dies_and_the_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    store = tmp_path / "store"
    training = Training(tmp_path / "1", str(store))
    code, said = training.train(3)
    assert code == 0 and stored(store) == [2], said
    training.lose()
    for step, put in ODD.items():
        directory = store / f"step-{step:012}-000001-{step}"
        directory.mkdir()
        put(directory / "keepstep.json")
    code, found = inspect(str(store))
    assert code == 1 and all(f"step-{step:012}" in found for step in ODD), found
    (store / OWNER).unlink()
    os.mkfifo(store / OWNER)
    code, said = training.train(5)
    assert code == 0, said
    assert [event.data["step"] for event in training.events("restored")] == [2]
    assert {event.data["step"] for event in training.events("checkpoint-damaged")} == {*ODD}
    assert len(training.events("keeper-started")) == 2, "one in each life"
    assert stored(store)[0] == 4


def test_what_is_no_checkpoint_holds_up_no_start_and_stops_no_writer(tmp_path: Path) -> None:
    """Put there before anything says whose the store is, and between two lives."""
    store = tmp_path / "store"
    training = Training(tmp_path / "1", str(store))
    training.start(4, held=1)
    training.hold()
    store.mkdir(exist_ok=True)
    strays = [store / f"step-000000000001-000000-{attempt}" for attempt in (1, 2)]
    strays[0].symlink_to("/nowhere")
    strays[1].write_bytes(b"")
    training.go_on()
    code, said = training.end()
    assert code == 0 and stored(store) == [3], said
    training.lose()
    for step, put in NO_CHECKPOINT.items():
        put(store / f"step-{step:012}-000001-{step}")
    code, said = training.train(7, EVERY="2")
    assert code == 0, said
    assert not training.events("store-unreachable")
    assert [event.data["step"] for event in training.events("restored")] == [3]
    assert stored(store)[0] == 6
    told = training.events("persisted")[-1].why
    assert "left 1 checkpoint that cannot be looked at" in told, told
    assert all(os.path.lexists(stray) for stray in strays), "they are left alone"
