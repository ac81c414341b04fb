"""Store: what exists, what is damaged, what is left after a failure; on a disk, in memory and over
S3."""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
import subprocess
import sys
import types
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.store.checked_file import BLOCK_BYTES, store_errors
from keepstep.edge.store.draft import MANIFEST
from keepstep.edge.store.manifest import FileSum, Manifest, manifest_from_bytes
from keepstep.edge.store.owner import StoreUser
from keepstep.edge.store.store import Store
from keepstep.errors import DamageError, StoreError
from keepstep.model.checkpoint import CheckpointName, StoreListing, Timeline
from keepstep.model.snapshot import Stamp

NEWER = CheckpointName(0, 1)
SMALL = {"a": b"alpha", "b": b"beta"}


def write(store: Store, step: int, contents: dict[str, bytes], **about: Any) -> Manifest:
    """A checkpoint of these files, each written in uneven pieces."""
    with store.draft(CheckpointName(step)) as draft:
        for name, data in contents.items():
            with draft.open(name) as file:
                for at in range(0, len(data), 3_000_001):
                    file.write(data[at : at + 3_000_001])
        values = {
            "job": "test",
            "world_size": 1,
            "metrics": {},
            "wall_ns": 7,
            "fingerprint": {},
            **about,
        }
        manifest = Manifest(step=step, files=dict(draft.files), **values)
        draft.publish(manifest)
    return manifest


def steps(store: Store) -> list[int]:
    return [m.step for m in store.list_checkpoints().checkpoints]


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


@pytest.fixture(scope="module")
def s3_options() -> Iterator[dict[str, Any]]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": f"http://{host}:{port}"},
    }
    fsspec.filesystem("s3", **options).mkdir("bucket")
    yield options
    server.stop()


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local":
        yield Store(tmp_path / "store")
    elif request.param == "s3":
        yield Store(f"s3://bucket/{uuid.uuid4()}", **request.getfixturevalue("s3_options"))
    else:
        name = f"/{uuid.uuid4()}"
        yield Store(f"memory://{name}")
        if MemoryFileSystem().exists(name):
            MemoryFileSystem().rm(name, recursive=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Eight MiB of room."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs root to mount a small tmpfs: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_what_is_written_is_listed_and_read_back(store: Store) -> None:
    rng = random.Random(1)
    contents = {
        f"file{size}": rng.randbytes(size)
        for size in (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 3)
    }
    assert steps(store) == []
    written = write(store, 12, contents, metrics={"loss": 0.5}, fingerprint={"model": ["a", 1]})
    write(store, 7, SMALL)
    listing = store.list_checkpoints()
    assert [m.step for m in listing.checkpoints] == [12, 7] and listing.broken == {}
    assert listing.checkpoints[0] == written
    seen: list[tuple[int, int]] = []
    assert store.verify(12, lambda done, total: seen.append((done, total))) == written
    assert seen == sorted(seen) and seen[-1] == (written.total_bytes, written.total_bytes)
    for name, data in contents.items():
        file = store.open(written, name)
        assert file.read() == data
        for _ in range(20 if data else 0):
            start, size = rng.randrange(len(data)), rng.randrange(1, 100_000)
            assert file.seek(start) == start and file.read(size) == data[start : start + size]


def test_removing_leaves_the_others(store: Store) -> None:
    for step in (1, 2, 3):
        write(store, step, SMALL)
    store.remove(CheckpointName(2))
    store.remove(CheckpointName(2))
    assert steps(store) == [3, 1] and store.list_checkpoints().broken == {}
    assert store.intact(2) is None and store.intact(3) is not None


def test_a_draft_that_is_not_published_does_not_exist(store: Store) -> None:
    write(store, 1, SMALL)
    abandoned = store.draft(CheckpointName(2))
    with abandoned.open("a") as file:
        file.write(b"half")
    listing = store.list_checkpoints()
    assert [m.step for m in listing.checkpoints] == [1]
    # An object store has no directory until there is a file in it, hence the file above.
    assert list(listing.broken) == [2] and "expected a manifest, found none" in listing.broken[2]
    assert store.incomplete(NEWER).names == [CheckpointName(2)]
    store.remove(CheckpointName(2))
    assert steps(store) == [1] and store.list_checkpoints().broken == {}


def test_a_failed_draft_removes_itself_and_can_be_written_again(store: Store) -> None:
    write(store, 1, SMALL)
    with pytest.raises(KeyError), store.draft(CheckpointName(2)) as draft:
        with draft.open("a") as file:
            file.write(b"half")
        raise KeyError("the trainer's own mistake")
    assert steps(store) == [1] and store.list_checkpoints().broken == {}
    write(store, 2, SMALL)
    assert steps(store) == [2, 1]


def test_a_checkpoint_is_never_drafted_over(store: Store) -> None:
    write(store, 1, SMALL)
    with pytest.raises(StoreError, match="expected no checkpoint, found one"):
        store.draft(CheckpointName(1))
    assert store.intact(1) is not None


def file_sum(size: int) -> FileSum:
    return FileSum(size, BLOCK_BYTES, ("0123456789abcdef",) * -(-size // BLOCK_BYTES))


@given(
    st.builds(
        Manifest,
        job=st.text(st.characters(exclude_categories=["C", "Z"]), max_size=10),
        step=st.integers(0, 10**12 - 1),
        world_size=st.integers(1, 10**5),
        metrics=st.dictionaries(
            st.text(max_size=5), st.floats(allow_nan=False) | st.integers(-5, 5).map(float)
        ),
        wall_ns=st.integers(0, 2**63 - 1),
        fingerprint=st.dictionaries(
            st.text(max_size=5), st.none() | st.text(max_size=5) | st.lists(st.integers())
        ),
        files=st.dictionaries(
            st.from_regex(r"\.?[a-z0-9_ é]{1,5}", fullmatch=True),
            st.builds(file_sum, st.integers(0, 20 * BLOCK_BYTES)),
            max_size=3,
        ),
    )
)
def test_a_manifest_says_the_same_after_a_round_trip(manifest: Manifest) -> None:
    assert manifest_from_bytes(manifest.to_bytes(), "here") == manifest


def test_a_loss_that_is_not_a_number_survives() -> None:
    metrics = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    read = manifest_from_bytes(Manifest("j", 1, 1, metrics, 0, {}, {}).to_bytes(), "here").metrics
    assert math.isnan(read["nan"]) and read["inf"] == math.inf and read["-inf"] == -math.inf


def test_every_single_bit_of_a_manifest_is_guarded() -> None:
    files = {".metadata": FileSum(5, BLOCK_BYTES, ("0123456789abcdef",))}
    raw = Manifest("job", 3, 2, {"loss": 0.25}, 17, {"model": "gpt"}, files).to_bytes()
    assert manifest_from_bytes(raw, "here").step == 3
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamageError):
            manifest_from_bytes(bytes(damaged), "here")
    for length in range(len(raw)):
        with pytest.raises(DamageError):
            manifest_from_bytes(raw[:length], "here")


def test_a_flipped_bit_is_found_and_its_block_never_handed_out(tmp_path: Path) -> None:
    store, rng = Store(tmp_path), random.Random(2)
    data = rng.randbytes(3 * BLOCK_BYTES + 100)
    manifest = write(store, 5, {"data": data})
    path = tmp_path / "step-000000000005" / "data"
    for _ in range(40):
        bit = rng.randrange(8 * len(data))
        block = bit // 8 // BLOCK_BYTES
        flip(path, bit)
        with pytest.raises(
            DamageError,
            match=rf"step-000000000005/data: block {block} .*"
            r"expected xxh3_64 \w{16}, found \w{16}",
        ):
            store.verify(5)
        assert store.intact(5) is None
        file = store.open(manifest, "data")
        handed_out = bytearray(BLOCK_BYTES)
        file.seek(block * BLOCK_BYTES)
        with pytest.raises(DamageError):
            file.readinto(handed_out)
        assert not any(handed_out)
        other = (block + 1) % 4
        file.seek(other * BLOCK_BYTES)
        assert file.read(50) == data[other * BLOCK_BYTES :][:50]
        flip(path, bit)
    assert store.intact(5) == manifest


@pytest.mark.parametrize("change", ["shorter", "longer", "missing"])
def test_a_file_of_another_size_is_no_checkpoint(tmp_path: Path, change: str) -> None:
    store = Store(tmp_path)
    write(store, 1, SMALL)
    write(store, 2, SMALL)
    path = tmp_path / "step-000000000002" / "b"
    {
        "shorter": lambda: os.truncate(path, 3),
        "longer": lambda: os.truncate(path, 5),
        "missing": path.unlink,
    }[change]()
    listing = store.list_checkpoints()
    assert [m.step for m in listing.checkpoints] == [1]
    found = {"shorter": "3 bytes", "longer": "5 bytes", "missing": "no file"}[change]
    assert listing.broken[2].endswith(f"/b: expected 4 bytes, found {found} [KS2300]")
    with pytest.raises(DamageError, match=f"expected 4 bytes, found {found}"):
        store.verify(2)
    assert store.incomplete(NEWER).names == [], (
        "damaged is not incomplete: it stays for a person to look at"
    )


def test_another_steps_manifest_and_a_newer_format_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 3):
        write(store, step, SMALL)
    shutil.copy(
        tmp_path / "step-000000000001" / MANIFEST, tmp_path / "step-000000000002" / MANIFEST
    )
    import xxhash

    path = tmp_path / "step-000000000003" / MANIFEST
    rest = path.read_bytes().split(b"\n", 1)[1].replace(b'"format": 1', b'"format": 2')
    path.write_bytes(b'{"xxh3_64": "%s",\n%s' % (xxhash.xxh3_64_hexdigest(rest).encode(), rest))
    listing = store.list_checkpoints()
    assert [m.step for m in listing.checkpoints] == [1]
    assert (
        "expected the manifest of step-000000000002, found that of step-000000000001"
        in listing.broken[2]
    )
    assert "expected manifest format 1, found 2" in listing.broken[3]


def test_what_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / "step-12").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    write(store, 1, SMALL)
    assert (
        steps(store) == [1]
        and store.list_checkpoints().broken == {}
        and store.incomplete(NEWER).names == []
    )
    assert (tmp_path / "step-12").is_dir() and (tmp_path / "notes.txt").read_text() == "mine"


def refuse(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EIO, "the disk refuses")


def test_a_checkpoint_has_the_files_of_its_manifest_and_no_others(store: Store) -> None:
    name = CheckpointName(2)
    with store.draft(name) as draft:
        with draft.open("a") as file:
            file.write(b"alpha")
        store._fs.pipe_file(f"{store.path(name)}/of-a-life-before", b"x")
        draft.publish(Manifest("test", 2, 1, {}, 7, {}, dict(draft.files)))
    store._fs.invalidate_cache()
    there = {path.rsplit("/", 1)[-1] for path in store._fs.ls(store.path(name), detail=False)}
    assert "a" in there and "of-a-life-before" not in there
    assert store.intact(2) is not None


@pytest.fixture
def memory() -> Iterator[Store]:
    name = f"/{uuid.uuid4()}"
    yield Store(f"memory://{name}")
    MemoryFileSystem().rm(name, recursive=True)


def test_a_half_removed_checkpoint_does_not_exist(
    memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(memory, 1, SMALL)
    write(memory, 2, SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "rm", refuse)
        with pytest.raises(
            StoreError,
            match=r"removing .*expected it to succeed, found OSError: .*the disk refuses",
        ):
            memory.remove(CheckpointName(2))
    listing = memory.list_checkpoints()
    assert [m.step for m in listing.checkpoints] == [1] and list(listing.broken) == [2]


def test_a_manifest_that_cannot_be_put_publishes_nothing(
    memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(memory, 1, SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", refuse)
        with pytest.raises(StoreError, match=r"publishing .*the disk refuses"):
            write(memory, 2, SMALL)
    assert steps(memory) == [1] and memory.intact(1) is not None
    # What is left cannot be claimed either, and the put may still come through: it goes later.
    assert list(memory.look().unfinished) == [2]
    assert memory.incomplete(NEWER).names == [CheckpointName(2)]
    memory.remove_unpublished(CheckpointName(2))
    assert memory.list_checkpoints().broken == {}


def test_no_space_is_said_with_numbers_and_costs_nothing_else(small_disk: Path) -> None:
    store = Store(small_disk)
    write(store, 1, {"data": random.Random(3).randbytes(3 << 20)})
    with pytest.raises(
        StoreError,
        match=r"writing .*step-000000000002/data: .*No space left on device.* with .* free",
    ):
        write(store, 2, {"data": random.Random(4).randbytes(9 << 20)})
    assert steps(store) == [1] and store.list_checkpoints().broken == {}
    assert store.intact(1) is not None
    write(store, 3, {"data": random.Random(5).randbytes(3 << 20)})
    assert steps(store) == [3, 1], "the room the failed one took is free again"


def _fails_once_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """The `call`-th time from now that something is looked at, listed or read in memory."""
    calls = iter(range(1, 10**6))
    for name in ("info", "ls", "cat_file"):
        own = getattr(MemoryFileSystem, name)

        def fails(self: Any, *args: Any, own: Any = own, **how: Any) -> Any:
            if next(calls) == call:
                raise OSError(errno.EIO, "once")
            return own(self, *args, **how)

        monkeypatch.setattr(MemoryFileSystem, name, fails)


def test_a_look_that_fails_removes_no_checkpoint_and_hides_none(
    memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(memory, 1, SMALL)
    failed = 0
    for call in range(1, 12):
        with monkeypatch.context() as patch:
            _fails_once_at(patch, call)
            try:
                found = memory.look()
                assert found == StoreListing([1], epochs={1: 0}) or list(found.unreachable) == [1]
                failed += bool(found.unreachable)
            except StoreError:
                failed += 1
        with monkeypatch.context() as patch, suppress(StoreError):
            _fails_once_at(patch, call)
            memory.incomplete(NEWER)
        with monkeypatch.context() as patch, pytest.raises(StoreError):
            _fails_once_at(patch, call)
            memory.draft(CheckpointName(1))
        assert memory.look() == StoreListing([1], epochs={1: 0})
    assert failed > 1


def test_a_place_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"creating .*expected it to succeed, found"):
        Store(tmp_path / "file").draft(CheckpointName(1))
    with pytest.raises(StoreError, match="expected a directory or an fsspec URL"):
        Store("nosuch://place")


def test_an_object_store_that_does_not_answer_is_a_store_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import s3fs.core

    monkeypatch.setattr(s3fs.core.S3FileSystem, "retries", 1)
    nobody = {"endpoint_url": "http://127.0.0.1:9", "region_name": "us-east-1"}
    quick = {"connect_timeout": 1, "retries": {"max_attempts": 0}}
    store = Store(
        "s3://bucket/place", key="test", secret="test", client_kwargs=nobody, config_kwargs=quick
    )
    with pytest.raises(StoreError, match=r"listing .*expected it to succeed, found"):
        store.list_checkpoints()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("asyncio", "TimeoutError"),
        ("aiohttp", "ClientError"),
        ("google.auth.exceptions", "GoogleAuthError"),
        ("azure.core.exceptions", "AzureError"),
    ],
)
def test_what_a_library_raises_of_its_own_is_a_store_error(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No OSError, and in it the words of whoever answered."""
    error = type(name, (Exception,), {})
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{name: error}))
    told = r"reading it: expected .*found \w+: slow\?\[2J"
    with pytest.raises(StoreError, match=told), store_errors("reading it"):
        raise error("slow\x1b[2J")


def test_nobody_answers_at_the_url() -> None:
    with pytest.raises(StoreError, match="expected a directory or an fsspec URL"):
        Store("ftp://127.0.0.1:1/run")


EXAMPLES = Path(__file__).parent / "examples"


def test_checkpoints_from_before_attempts_had_names_are_read(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "without_attempts", tmp_path / "store")
    store = Store(tmp_path / "store")
    assert store.look() == StoreListing([19, 12], epochs={19: 0, 12: 0})
    manifest = store.verify(12)
    assert (manifest.job, manifest.world_size, manifest.timeline) == ("train", 2, None)
    assert store.open(manifest, "a").read() == b"alpha"
    write_attempt(store, CheckpointName(13, 1, 5), Timeline(1, 12))
    assert store.look() == StoreListing([13, 12], epoch=1, epochs={13: 1, 12: 0}), (
        "the job went on from step 12"
    )
    assert store.incomplete(CheckpointName(0, 9)).names == [] and store.intact(19) is not None


def write_attempt(
    store: Store, name: CheckpointName, timeline: Timeline | None = None, job: str = "test"
) -> None:
    with store.draft(name) as draft:
        with draft.open("a") as file:
            file.write(b"%d" % name.attempt)
        files = dict(draft.files)
        draft.publish(Manifest(job, name.step, 1, {}, 7, {}, files, *name[1:], timeline))


def test_of_two_attempts_at_one_step_the_higher_counts_whoever_is_first(store: Store) -> None:
    names = [CheckpointName(5, 1, 9), CheckpointName(5, 2, 3), CheckpointName(5, 1, 8)]
    for name in names:
        write_attempt(store, name)
    assert steps(store) == [5] and store.read_manifest(5).name == names[1]
    assert store.named(5) == names[1] and len(store.published()) == 3
    assert store.intact_of(Stamp(5, 1), "test") == store.read_manifest(names[0])
    assert store.intact_of(Stamp(5, 3), "test") is None
    assert store.intact_of(Stamp(5, 1), "another") is None


def test_a_higher_attempt_that_is_damaged_is_not_taken_for_the_lower_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_attempt(store, CheckpointName(5, 1, 1))
    write_attempt(store, CheckpointName(5, 2, 2))
    place = store.place(CheckpointName(5, 2, 2), MANIFEST)
    flip(Path(place.path), 333)
    assert steps(store) == [] and list(store.look().damaged) == [5]


def test_what_a_newer_attempt_has_begun_is_nobodys_to_remove(store: Store) -> None:
    drafts = [store.draft(CheckpointName(5, epoch, 7)) for epoch in (1, 2, 3)]
    for draft in drafts:
        with draft.open("a") as file:
            file.write(b"begun")
    assert store.incomplete(drafts[1].name).names == [drafts[0].name]
    assert store.read_small(drafts[2].name, "a") == b"begun"


def test_an_absurd_name_pushes_no_epoch_out_of_what_names_can_hold(store: Store) -> None:
    """Anybody who may write there can make a directory."""
    with store.draft(CheckpointName(1, 999_999_999_999_999_999, 1)).open("a") as file:
        file.write(b"nobody's")
    with store.draft(CheckpointName(4, 7, 1)).open("a") as file:
        file.write(b"begun")
    assert store.list_checkpoints().epoch == 7


def test_a_link_that_was_put_in_a_files_place_is_not_followed(tmp_path: Path) -> None:
    store, name = Store(tmp_path / "store"), CheckpointName(5, 1, 1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"mine")
    draft = store.draft(name)
    with draft.open("a") as file:
        file.write(b"first")
    Path(store.path(name, "b")).symlink_to(elsewhere)
    with draft.open("b") as file:
        file.write(b"second")
    assert elsewhere.read_bytes() == b"mine"
    assert not Path(store.path(name, "b")).is_symlink()
    assert store.read_small(name, "b") == b"second"


def test_a_link_that_was_put_in_a_checkpoints_place_is_not_followed(tmp_path: Path) -> None:
    """Whoever may write to the store could have this user's files elsewhere replaced, or removed
    as files of no manifest."""
    store, name = Store(tmp_path / "store"), CheckpointName(5, 1, 1)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("mine")
    draft = store.draft(name)
    with draft.open("a") as file:
        file.write(b"first")
    directory = Path(store.path(name))
    directory.rename(tmp_path / "aside")
    directory.symlink_to(home)
    with pytest.raises(StoreError, match="writing"), draft.open("thesis") as file:
        file.write(b"second")
    with pytest.raises(StoreError, match="clearing"):
        store.clear(name, keep=lambda _: False)
    assert [(path.name, path.read_text()) for path in home.iterdir()] == [("thesis", "mine")]


def test_a_manifest_takes_the_place_of_none(store: Store) -> None:
    name = CheckpointName(5, 1, 1)
    first, second = store.draft(name), store.draft(name)
    made = []
    for draft, wall_ns in ((first, 1), (second, 2)):
        with draft.open("a") as file:
            file.write(b"same")
        made.append(Manifest("j", 5, 1, {}, wall_ns, {}, dict(draft.files), 1, 1))
    first.publish(made[0])
    with pytest.raises(StoreError):
        second.publish(made[1])
    second.abandon()
    assert store.read_manifest(5) == made[0]


def test_what_is_in_doubt_counts_no_more_and_is_not_removed(store: Store) -> None:
    for step in (3, 5, 7):
        write_attempt(store, CheckpointName(step, 1, 1), Timeline(1, -1))
    write_attempt(store, CheckpointName(9, 2, 1), Timeline(2, 7))
    assert store.doubt(5, 2) == [CheckpointName(step, 1, 1).directory for step in (5, 7)]
    found = store.look()
    assert list(found.usable) == [9, 3] and set(found.damaged) == {5, 7}
    assert "in doubt" in found.damaged[5] and not found.unfinished
    assert store.doubt(5, 2) == [], "each is told once"
    assert all(store.intact(CheckpointName(step, 1, 1)) is not None for step in (5, 7))
    write_attempt(store, CheckpointName(5, 2, 1), Timeline(2, 3))  # the step, computed again
    assert list(store.look().usable) == [9, 5, 3]


def test_a_doubt_is_not_about_what_another_job_has_computed(tmp_path: Path) -> None:
    """Who has adopted it doubts its own numbers."""
    store = Store(tmp_path / "store")
    write_attempt(store, CheckpointName(5, 1, 1), Timeline(1, -1), job="another")
    write_attempt(store, CheckpointName(7, 2, 1), Timeline(2, 5))
    adopting = Store(tmp_path / "store", user=StoreUser("test", adopts=True))
    assert adopting.doubt(0, 3) == [CheckpointName(7, 2, 1).directory]
    assert store.intact_of(Stamp(5, 1), "another") is not None
    assert store.intact_of(Stamp(5, 1), "test") is None, "each job writes its own"


def test_of_what_is_in_doubt_the_way_of_the_job_still_counts(store: Store) -> None:
    """Else what was left behind before it would come back."""
    write_attempt(store, CheckpointName(3, 1, 1), Timeline(1, -1))
    write_attempt(store, CheckpointName(8, 1, 1), Timeline(1, -1))
    write_attempt(store, CheckpointName(6, 2, 1), Timeline(2, 4))
    store.doubt(6, 3)
    found = store.look()
    assert list(found.usable) == [3] and set(found.damaged) == {6}


def test_a_store_in_which_all_is_in_doubt_is_not_taken_for_an_empty_one(store: Store) -> None:
    write_attempt(store, CheckpointName(3, 1, 1), Timeline(1, -1))
    store.doubt(0, 2)
    assert store.look().damaged and not store.look().usable


@pytest.mark.parametrize("moved", ["the store", "a step", "a manifest"])
def test_a_link_that_leads_nowhere_now_is_not_an_empty_store(tmp_path: Path, moved: str) -> None:
    """Checkpoints were moved to another disk and linked to, and that is not mounted."""
    root, disk = tmp_path / "store", tmp_path / "disk"
    write(Store(str(root)), 5, {"state": b"x" * 100})
    [step_dir] = root.glob("step-*")
    place = {"the store": root, "a step": step_dir, "a manifest": step_dir / MANIFEST}[moved]
    place.rename(disk)
    place.symlink_to(disk)
    store = Store(str(root))
    assert store.look().usable == [5]
    disk.rename(tmp_path / "away")
    if moved == "the store":
        with pytest.raises(StoreError, match="what the link leads to"):
            store.look()
    else:
        listing = store.look()
        assert listing.usable == [] and list(listing.unreachable) == [5]
    (tmp_path / "away").rename(disk)
    assert store.look().usable == [5]


def test_an_object_in_a_directorys_place_hides_no_checkpoint(store: Store) -> None:
    """Only on a disk can the two not be of one name."""
    name = CheckpointName(310, 1, 1)
    store._fs.makedirs(store.root, exist_ok=True)
    store._fs.pipe_file(store.path(name), b"x")
    assert not store.incomplete(before=CheckpointName(400, 2, 5)).unseen
    write_attempt(store, CheckpointName(400, 2, 5), Timeline(2, 399))
    found = store.look()
    assert list(found.usable) == [400] and not found.unreachable
    assert list(found.damaged if store.disk else found.unfinished) == [310]
