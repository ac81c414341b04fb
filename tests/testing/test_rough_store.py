"""The rough store: what a bucket is, each way of being rough, and that nothing is there by half."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.store import Store
from keepstep.errors import StoreError
from keepstep.model.checkpoint import CheckpointName
from keepstep.testing import rough_store as module
from keepstep.testing.faults import STORE_KINDS
from keepstep.testing.rough_filesystem import RoughFileSystem
from keepstep.testing.rough_store import BEHAVIOURS, BUCKET, RoughStore, half_checkpoints

NAME = CheckpointName(7, 1, 3)


@pytest.fixture
def rough(tmp_path: Path) -> Iterator[RoughStore]:
    with RoughStore(tmp_path / "store") as store:
        yield store


def files_of(rough: RoughStore) -> RoughFileSystem:
    return RoughFileSystem(**RoughFileSystem._get_kwargs_from_urls(rough.url))


def put(store: Store, raw: bytes = b"weights" * 1000, name: CheckpointName = NAME) -> None:
    with store.draft(name) as draft:
        with draft.open("a.distcp") as file:
            file.write(raw)
        draft.read_back(["a.distcp"])
        about = {"epoch": name.epoch, "attempt": name.attempt}
        draft.publish(Manifest("j", name.step, 1, {}, 7, {}, dict(draft.files), **about))


def test_every_kind_of_fault_has_its_behaviour() -> None:
    assert tuple(BEHAVIOURS) == STORE_KINDS


def test_it_is_a_bucket(rough: RoughStore) -> None:
    files, path = files_of(rough), f"{BUCKET}/a/b"
    files.makedirs(f"{BUCKET}/nothing")
    assert files.ls(BUCKET) == []
    files.pipe_file(path, b"0123456789")
    assert files.ls(BUCKET, detail=False) == [f"{BUCKET}/a"]
    assert files.info(path) == {"name": path, "type": "file", "size": 10}
    assert files.ls(path) == [files.info(path)] and files.isdir(f"{BUCKET}/a")
    assert [files.cat_file(path, *some) for some in ((2, 5), (8, 20), (3, 3), (None, None))] == [
        *(b"234", b"89", b"", b"0123456789")
    ]
    with pytest.raises(FileExistsError):
        files.pipe_file(path, b"other", mode="create")
    with files.open(path, "wb") as file:
        file.write(b"new")
    files.mv(path, f"{BUCKET}/a/c")
    assert files.find(BUCKET) == [f"{BUCKET}/a/c"] and files.cat_file(f"{BUCKET}/a/c") == b"new"
    files.rm(f"{BUCKET}/a", recursive=True)
    files.rm_file(f"{BUCKET}/a/c")
    assert files.ls(BUCKET) == [], "a directory is there where something lies in it"
    for missing in (path, f"{BUCKET}/../secret", f"{BUCKET}/.incoming", "/elsewhere"):
        with pytest.raises(FileNotFoundError):
            files.cat_file(missing)
    assert files.unstrip_protocol(path) == f"{rough.url}/a/b"


def test_a_process_finds_it_as_it_finds_other_filesystems(
    rough: RoughStore, tmp_path: Path
) -> None:
    program = "import fsspec, sys; fs, root = fsspec.core.url_to_fs(sys.argv[1]); fs.touch; "
    program += "fs.pipe_file(root + '/a', b'said')"
    environ = {**os.environ, **rough.environ(tmp_path, {"PYTHONPATH": "/else"})}
    assert environ["PYTHONPATH"].endswith(":/else")
    subprocess.run([sys.executable, "-c", program, rough.url], env=environ, check=True, timeout=60)
    assert (rough.directory / "a").read_bytes() == b"said"


def test_it_refuses_connections_and_keeps_its_address(rough: RoughStore) -> None:
    files, url = files_of(rough), rough.url
    for _ in range(3):
        rough.behave("refuses")
        with pytest.raises(ConnectionRefusedError):
            files.ls(BUCKET)
        rough.heal()
        assert files.ls(BUCKET) == [] and rough.url == url
    assert rough.met() == [], "nobody came to it"


def test_who_hangs_is_answered_when_it_heals(rough: RoughStore) -> None:
    files = files_of(rough)
    rough.behave("hangs", "PUT ")
    writer = threading.Thread(target=files.pipe_file, args=(f"{BUCKET}/a", b"late"))
    writer.start()
    while not rough.met():
        pass
    assert files.ls(BUCKET) == [] and writer.is_alive(), "others are answered"
    rough.heal()
    writer.join(30)
    assert files.cat_file(f"{BUCKET}/a") == b"late"
    assert rough.met() == [(os.getpid(), f"PUT {BUCKET}/a")]


def test_a_slow_one_answers(rough: RoughStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_NS", 1_000_000)
    rough.behave("slow")
    assert files_of(rough).ls(BUCKET) == [] and len(rough.met()) == 1


def test_one_that_is_full_says_so(rough: RoughStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, raw: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as caught:
        files_of(rough).pipe_file(f"{BUCKET}/a", b"much")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("fate", ["failed", "cut", "lost", "torn"])
def test_a_flaky_one_does_or_leaves_it(
    rough: RoughStore, monkeypatch: pytest.MonkeyPatch, fate: module.Fate
) -> None:
    files = files_of(rough)
    monkeypatch.setattr(module, "FLAKY_RATIO", 1.0)
    monkeypatch.setattr(module, "FLAKY", (fate,))
    rough.behave("flaky")
    with pytest.raises(OSError):
        files.pipe_file(f"{BUCKET}/a", b"0123456789")
    there = (rough.directory / "a").exists()
    assert there == (fate in ("lost", "torn")), "some are done, and nobody hears of it"
    rough.heal()
    files.pipe_file(f"{BUCKET}/a", b"0123456789")
    rough.behave("flaky")
    with pytest.raises(OSError):
        files.cat_file(f"{BUCKET}/a")


def test_it_is_not_always_flaky_and_a_seed_says_when(tmp_path: Path) -> None:
    met = []
    for n in range(2):
        with RoughStore(tmp_path / str(n), seed=5) as rough:
            rough.behave("flaky")
            met.append([rough.meet(1, f"GET {number}") for number in range(300)])
    assert met[0] == met[1] and 10 < 300 - met[0].count("done") < 60


@pytest.mark.parametrize("seed", range(4))
def test_a_flaky_store_never_has_half_a_checkpoint(
    rough: RoughStore, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """However often writing is tried, and wherever it fails."""
    monkeypatch.setattr(rough, "_rng", module.random.Random(seed))
    store = Store(BUCKET, fs=files_of(rough))
    rough.behave("flaky")
    failed = 0
    for attempt in range(1, 30):
        name = CheckpointName(attempt, 1, attempt)
        try:
            put(store, name=name)
        except StoreError:
            failed += 1
        assert half_checkpoints(rough.directory) == []
    rough.heal()
    put(store, name=CheckpointName(30, 1, 30))
    usable = [manifest.step for manifest in store.list_checkpoints().checkpoints]
    assert usable[0] == 30 and failed and len(usable) + failed >= 30


def test_half_a_checkpoint_is_found(rough: RoughStore) -> None:
    put(Store(BUCKET, fs=files_of(rough)))
    with rough.still() as directory:
        (file,) = directory.glob("step-*/a.distcp")
        assert half_checkpoints(directory) == []
        raw = file.read_bytes()
        file.write_bytes(raw[:-1] + b"?")
        assert "expected xxh3_64" in half_checkpoints(directory)[0]
        file.unlink()
        assert "found no file" in half_checkpoints(directory)[0]
