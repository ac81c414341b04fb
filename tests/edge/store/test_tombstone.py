"""Tombstone: of an attempt that is published while it is being removed, either all is there and it
exists, or it does not and never will; whichever call of the one the other comes between."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from keepstep.edge.store import checked_file
from keepstep.edge.store.draft import MANIFEST, UNPUBLISHED, Draft
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.signer import Signer
from keepstep.edge.store.store import Store
from keepstep.edge.store.tombstone import tombstone
from keepstep.errors import DamageError, StoreError
from keepstep.model.checkpoint import CheckpointName, StoreListing
from keepstep.model.snapshot import Stamp

NAME = CheckpointName(5, 1, 1)
NEWER = CheckpointName(6, 2, 1)
ON_A_DISK = ("open", "link", "unlink", "rmdir", "rename", "listdir", "fsync", "stat")
IN_MEMORY = ("_open", "info", "ls", "cat_file", "pipe_file", "rm_file", "rm", "_rm")
FIRST_CALLS, MOST_CALLS = 6, 200


class Disk(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Of one test."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]


def a_store(where: str, path: Path) -> Store:
    if where == "an object store":
        return Store("/store", fs=Disk(), block_bytes=64)
    return Store(path, block_bytes=64)


def a_draft(store: Store, name: CheckpointName = NAME) -> tuple[Draft, Manifest]:
    """All is written, and is to be published."""
    draft = store.draft(name)
    for file in ("a", "b"):
        with draft.open(file) as out:
            out.write(b"x" * 100)
    return draft, Manifest("j", name.step, 1, {}, 7, {}, dict(draft.files), *name[1:])


def published(draft: Draft, manifest: Manifest) -> bool:
    try:
        draft.publish(manifest)
    except (StoreError, DamageError):
        return False
    return True


def collected(store: Store) -> None:
    """What another persister does with what was never published."""
    try:
        for name in store.incomplete(NEWER).names:
            store.remove_unpublished(name)
    except StoreError:
        pass  # what is left is left for later


@contextmanager
def at_call(store: Store, call: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """In front of the `call`-th call that reaches the filesystem `act` happens, once. How many
    there were."""
    calls = [0]
    owner: Any = os if store.disk else store._fs
    names = ON_A_DISK if store.disk else IN_MEMORY

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            own = getattr(owner, name)

            def stopped(*args: Any, own: Any = own, **how: Any) -> Any:
                calls[0] += 1
                if calls[0] == call:
                    act()
                return own(*args, **how)

            patch.setattr(owner, name, stopped)
        yield calls


def check_either(store: Store, was_published: bool) -> None:
    """And what is left goes at the next removal."""
    if was_published:
        assert store.look() == StoreListing([5], epoch=1, epochs={5: 1})
        assert store.verify(NAME).name == NAME
        collected(store)
        assert store.intact(NAME) is not None
    else:
        found = store.look()
        assert not found.usable and not found.damaged
        collected(store)
        assert store.look() == StoreListing([])
        assert store.intact(NAME) is None and store.intact_of(Stamp(5, 1), "j") is None
        assert store.incomplete(NEWER).names == []


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(checked_file.NO_LINKS[0], "no second names here")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("where", ["a disk", "an object store"])
@pytest.mark.parametrize("first", ["publishing", "removing"])
def test_who_comes_between_any_two_calls_wins_whole_or_loses_whole(
    tmp_path: Path, where: str, first: str
) -> None:
    call, outcomes = 0, set()
    while True:
        call += 1
        store = a_store(where, tmp_path / str(call))
        draft, manifest = a_draft(store)
        result: list[bool] = []

        def publish(draft: Draft = draft, manifest: Manifest = manifest) -> None:
            result.append(published(draft, manifest))  # noqa: B023

        def collect(store: Store = store) -> None:
            collected(store)

        acts = (publish, collect) if first == "publishing" else (collect, publish)
        with at_call(store, call, acts[1]) as calls:
            acts[0]()
        if calls[0] < call:
            break
        assert call < MOST_CALLS
        check_either(store, result[0])
        outcomes.add(result[0])
    assert call > FIRST_CALLS and outcomes == {True, False}


@pytest.mark.parametrize("where", ["a disk", "an object store"])
def test_who_publishes_long_after_it_was_removed_publishes_nothing(
    tmp_path: Path, where: str
) -> None:
    """It had looked at all its files, and stood still right before the last call."""
    store = a_store(where, tmp_path)
    draft, manifest = a_draft(store)
    put_new = Store.put_new

    def late(self: Store, *args: Any) -> None:
        collected(store)
        collected(store)
        put_new(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "put_new", late)
        assert not published(draft, manifest)
    draft.abandon()
    check_either(store, was_published=False)


def test_who_wakes_before_its_last_call_publishes_all_or_nothing(tmp_path: Path) -> None:
    """It had looked at all its files, and goes on in the midst of their removal."""
    for call in range(1, MOST_CALLS):
        store = a_store("a disk", tmp_path / str(call))
        draft, manifest = a_draft(store)
        put_new = Store.put_new
        removing: list[list[int]] = []
        result: list[bool] = []

        def late(self: Store, *args: Any) -> None:
            def goes_on() -> None:
                try:
                    put_new(self, *args)  # noqa: B023
                    result.append(True)  # noqa: B023
                except OSError:
                    result.append(False)  # noqa: B023

            with at_call(store, call, goes_on) as calls:  # noqa: B023
                collected(store)  # noqa: B023
            removing.append(calls)  # noqa: B023
            if not (result and result[0]):  # noqa: B023
                raise OSError("it came to nothing")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "put_new", late)
            published(draft, manifest)
        if removing[0][0] < call:
            assert call > FIRST_CALLS
            return
        assert (store.exists(NAME) and store.intact(NAME) is not None) == result[0]
        check_either(store, result[0])


def test_a_put_that_was_called_a_failure_comes_through_before_the_files_go_or_not_at_all() -> None:
    """Its answer was lost, and it may still be on its way when its own writer gives up."""
    store = a_store("an object store", Path())
    draft, manifest = a_draft(store)
    on_its_way: list[bytes] = []

    def lost(self: Any, path: str, value: bytes, **how: Any) -> None:
        on_its_way.append(value)
        raise OSError("no answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Disk, "pipe_file", lost)
        assert not published(draft, manifest)
    draft.abandon()
    with pytest.raises(FileExistsError):
        store._fs.pipe_file(store.path(NAME, MANIFEST), on_its_way[0], mode="create")
    check_either(store, was_published=False)


@pytest.mark.parametrize("where", ["a disk", "an object store"])
def test_what_was_published_is_not_removed_as_what_was_not(tmp_path: Path, where: str) -> None:
    store = a_store(where, tmp_path)
    assert published(*a_draft(store))
    store.remove_unpublished(NAME)
    check_either(store, was_published=True)


@pytest.mark.parametrize("where", ["a disk", "an object store"])
def test_nothing_there_is_fine_and_a_removal_that_ended_halfway_is_gone_on_with(
    tmp_path: Path, where: str
) -> None:
    store = a_store(where, tmp_path)
    store.remove_unpublished(NAME)
    removed = []
    for call in range(1, MOST_CALLS):
        store = a_store(where, tmp_path / str(call))
        a_draft(store)

        def end() -> None:
            raise KeyboardInterrupt

        with at_call(store, call, end) as calls:
            try:
                collected(store)
            except KeyboardInterrupt:
                removed.append(call)
        if calls[0] < call:
            break
        check_either(store, was_published=False)
    assert len(removed) > FIRST_CALLS


def test_a_disk_keeps_nothing_of_what_was_removed(tmp_path: Path) -> None:
    store = a_store("a disk", tmp_path)
    a_draft(store)
    collected(store)
    assert list(tmp_path.iterdir()) == []


def test_an_object_store_keeps_a_tombstone_and_no_other_file() -> None:
    store = a_store("an object store", Path())
    a_draft(store)
    collected(store)
    assert list(store._fs.store) == [f"/store/{NAME.directory}/{MANIFEST}"]


@pytest.mark.parametrize("where", ["a disk", "an object store"])
def test_a_tombstone_of_a_later_attempt_hides_no_checkpoint_of_the_same_step(
    tmp_path: Path, where: str
) -> None:
    store = a_store(where, tmp_path)
    assert published(*a_draft(store))
    later = NAME._replace(epoch=NAME.epoch + 1)
    a_draft(store, later)
    raw = tombstone(later, store.signer)  # and whoever removed it went no further
    store._fs.pipe_file(store.path(later, MANIFEST), raw)
    assert [found.name for found in store.list_checkpoints().checkpoints] == [NAME]
    assert store.named(NAME.step) == NAME and store.verify(NAME.step).name == NAME


def test_a_file_system_without_links_removes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_links(monkeypatch)
    store = a_store("a disk", tmp_path)
    draft, manifest = a_draft(store)
    store.remove_unpublished(NAME)
    assert not published(draft, manifest) and list(tmp_path.iterdir()) == []
    assert published(*a_draft(store))
    store.remove_unpublished(NAME)
    check_either(store, was_published=True)


def test_a_full_disk_gets_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte can be written there, and what is never published fills it."""
    store = a_store("a disk", tmp_path)
    a_draft(store)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checked_file, "_put_on_disk", full)
        store.remove_unpublished(NAME)
    assert list(tmp_path.iterdir()) == []


def test_a_tombstone_of_a_strangers_removes_nothing_and_is_damage(tmp_path: Path) -> None:
    """Where the job has a secret. Else who may write there could have it remove by a note."""
    store = Store(tmp_path, signer=Signer("secret"))
    draft, manifest = a_draft(store)
    assert published(draft, manifest)
    os.unlink(store.path(NAME, MANIFEST))
    Path(store.path(NAME, MANIFEST)).write_bytes(tombstone(NAME, None))
    assert list(store.look().damaged) == [5] and store.incomplete(NEWER).names == []
    Path(store.path(NAME, MANIFEST)).write_bytes(tombstone(NEWER, store.signer))
    assert list(store.look().damaged) == [5] and store.incomplete(NEWER).names == []
    Path(store.path(NAME, MANIFEST)).write_bytes(tombstone(NAME, store.signer))
    assert store.incomplete(NEWER).names == [NAME]
    collected(store)
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_was_put_in_an_attempts_place_is_not_followed(tmp_path: Path) -> None:
    store, home = Store(tmp_path / "store"), tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("mine")
    a_draft(store)
    directory = Path(store.path(NAME))
    directory.rename(tmp_path / "aside")
    directory.symlink_to(home)
    with pytest.raises(StoreError, match="removing"):
        store.remove_unpublished(NAME)
    assert [(path.name, path.read_text()) for path in home.iterdir()] == [("thesis", "mine")]


def test_directories_in_an_attempt_go_too(tmp_path: Path) -> None:
    store = a_store("a disk", tmp_path)
    a_draft(store)
    inner = Path(store.path(NAME)) / "inner"
    inner.mkdir()
    (inner / UNPUBLISHED).write_text("of nobody")
    collected(store)
    assert list(tmp_path.iterdir()) == []
