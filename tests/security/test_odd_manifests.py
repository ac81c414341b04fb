"""Whoever can write to the store has put odd things where manifests are: no keeper dies of one,
and the job goes on from the newest checkpoint that is whole."""

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
