"""Strays: what has a checkpoint's name in a store and cannot be looked at concerns only itself."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from keepstep.edge.store.owner import OWNER, StoreUser
from keepstep.edge.store.store import Store
from keepstep.errors import DamageError, IdentityError, StoreError
from keepstep.model.checkpoint import CheckpointName, Timeline, checkpoint_named
from keepstep.model.snapshot import Stamp
from tests.edge.store.test_store import SMALL, write, write_attempt

NEXT = CheckpointName(400, 2, 5)
STRAY = CheckpointName(310, 1, 1)
NO_DIRECTORY: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_bytes(b""),
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a file": lambda path: path.symlink_to("/etc/hostname"),
}
UNSEEN: dict[str, Callable[[Path], object]] = {
    "a link to nothing": lambda path: path.symlink_to(path.parent / "away"),
    "a closed directory": lambda path: path.mkdir(mode=0),
}


@pytest.fixture
def place() -> Iterator[Path]:
    """Of a user for whom closed is closed."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield path
    if is_root:
        os.seteuid(0)
    for closed in path.glob("step-*"):
        if not closed.is_symlink():
            closed.chmod(0o700)
    shutil.rmtree(path)


def of(place: Path, job: str = "test") -> Store:
    return Store(place, user=StoreUser(job))


@pytest.mark.parametrize("kind", [*NO_DIRECTORY, *UNSEEN])
@pytest.mark.parametrize("has_owner", [True, False])
def test_one_stray_stops_no_writer(place: Path, kind: str, has_owner: bool) -> None:
    """Of the store's own past (`STRAY`) or in the very step that is to be written."""
    if has_owner:
        of(place).claim()
    make = NO_DIRECTORY.get(kind) or UNSEEN[kind]
    for name in (STRAY, NEXT._replace(attempt=9)):
        make(place / name.directory)
    left = CheckpointName(320, 1, 2)
    with Store(place).draft(left).open("data") as file:
        file.write(b"half")
    mine = of(place)
    mine.claim()
    assert (place / OWNER).exists()
    found = mine.incomplete(before=NEXT)
    assert list(found.names) == [left]
    assert [STRAY.directory in why for why in found.unseen] == [True] * (kind in UNSEEN)
    assert mine.intact_of(Stamp(NEXT.step, NEXT.epoch), "test") is None
    write_attempt(mine, NEXT, Timeline(2, -1))
    assert mine.intact_of(Stamp(NEXT.step, NEXT.epoch), "test") is not None
    assert [each.name for each in mine.published()] == [NEXT]
    mine.remove_unpublished(left)
    for name in (STRAY, NEXT._replace(attempt=9)):
        assert os.path.lexists(place / name.directory), "it is left alone"


@pytest.mark.parametrize("kind", [*NO_DIRECTORY, *UNSEEN])
def test_one_stray_is_no_fresh_start(place: Path, kind: str) -> None:
    """What is no directory is asked for once; what nobody can look into may be seen later."""
    (NO_DIRECTORY.get(kind) or UNSEEN[kind])(place / STRAY.directory)
    found = of(place).look()
    shown, other = found.damaged, found.unreachable
    if kind in UNSEEN:
        shown, other = other, shown
    assert list(shown) == [STRAY.step] and not other and not found.unfinished
    with pytest.raises(DamageError if kind in NO_DIRECTORY else StoreError):
        Store(place).read_manifest(STRAY)
    write(of(place), 5, SMALL)
    assert of(place).look().usable == [5]
    with pytest.raises(IdentityError):
        of(place, "another").claim()


@pytest.mark.parametrize("kind", UNSEEN)
def test_an_intact_checkpoint_that_is_hidden_is_taken_when_it_can_be(
    place: Path, kind: str
) -> None:
    mine, hidden = of(place), place / STRAY.directory
    write_attempt(mine, STRAY, Timeline(1, -1))
    if kind == "a closed directory":
        hidden.chmod(0)
    else:
        hidden.rename(place / "elsewhere")
        hidden.symlink_to(place / "away")
    assert list(mine.look().unreachable) == [STRAY.step]
    found = mine.incomplete(before=NEXT)
    assert not found.names and len(found.unseen) == 1
    with pytest.raises(StoreError):
        mine.remove_unpublished(STRAY)
    if kind == "a closed directory":
        hidden.chmod(0o700)
    else:
        (place / "elsewhere").rename(place / "away")
    assert mine.look().usable == [STRAY.step]
    assert mine.intact(STRAY) is not None


def test_what_an_object_store_does_not_show_concerns_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another account's objects, say."""
    store = Store(f"memory:///{uuid.uuid4()}")
    left = CheckpointName(320, 1, 2)
    for name in (STRAY, left):
        with store.draft(name).open("data") as file:
            file.write(b"half")

    def closed(own: Any) -> Any:
        def look(self: Any, path: str, *args: Any, **how: Any) -> Any:
            if STRAY.directory in path:
                raise PermissionError(errno.EACCES, "Access Denied", path)
            return own(self, path, *args, **how)

        return look

    for call in ("info", "ls", "cat_file"):
        monkeypatch.setattr(MemoryFileSystem, call, closed(getattr(MemoryFileSystem, call)))
    found = store.incomplete(before=NEXT)
    assert list(found.names) == [left]
    assert len(found.unseen) == 1 and "Access Denied" in found.unseen[0]
    assert list(store.look().unreachable) == [STRAY.step]
    mine = Store(store.root, fs=store._fs, user=StoreUser("test"))
    mine.claim()
    write_attempt(mine, NEXT, Timeline(2, -1))
    assert mine.look().usable == [NEXT.step]
    monkeypatch.undo()
    store._fs.rm(store.root, recursive=True)


@pytest.mark.parametrize(
    "spelt",
    [
        "step-000000000310-000001-\N{ARABIC-INDIC DIGIT ONE}",
        "step-000000000310-000001-01",
        "step-000000000310-0000001-1",
        "step-000000000310-000000-0",
        "step-000000000310-000001-1\n",
    ],
)
def test_a_name_has_one_spelling(tmp_path: Path, spelt: str) -> None:
    assert checkpoint_named(STRAY.directory) == STRAY
    assert checkpoint_named(CheckpointName(310).directory) == CheckpointName(310)
    assert checkpoint_named(spelt) is None
    (tmp_path / spelt).mkdir()
    assert not Store(tmp_path).list_checkpoints().broken
