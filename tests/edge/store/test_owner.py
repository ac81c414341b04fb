"""Whose a store is: another job's checkpoints are not taken, and nobody's is everybody's."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from keepstep.edge.store.checked_file import put_whole
from keepstep.edge.store.draft import MANIFEST
from keepstep.edge.store.owner import OWNER, StoreUser, owner_record
from keepstep.edge.store.store import Store
from keepstep.errors import IdentityError, StoreError
from tests.edge.store.test_store import SMALL, steps, write


def of(place: Path, job: str, adopts: bool = False) -> Store:
    return Store(place / "store", user=StoreUser(job, adopts))


def test_an_empty_store_is_whose_who_claims_it_first(tmp_path: Path) -> None:
    assert of(tmp_path, "a").look().usable == []
    of(tmp_path, "a").claim()
    of(tmp_path, "a").claim()
    with pytest.raises(IdentityError, match="'b', found those of 'a'.*--adopt"):
        of(tmp_path, "b").claim()
    with pytest.raises(IdentityError):
        of(tmp_path, "b").look()
    with pytest.raises(IdentityError):
        of(tmp_path, "b").begin_run()
    assert of(tmp_path, "a").look().usable == []


def test_whose_a_store_from_before_is_its_checkpoints_tell(tmp_path: Path) -> None:
    write(of(tmp_path, "a"), 3, SMALL, job="a")
    assert of(tmp_path, "a").look().usable == [3]
    with pytest.raises(IdentityError, match="found those of 'a'"):
        of(tmp_path, "b").look()
    with pytest.raises(IdentityError):
        of(tmp_path, "b").claim()
    assert not (tmp_path / "store" / OWNER).exists()


def test_who_adopts_goes_on_from_what_is_there_and_owns_it(tmp_path: Path) -> None:
    write(of(tmp_path, "a"), 3, SMALL, job="a")
    of(tmp_path, "a").claim()
    assert of(tmp_path, "b", adopts=True).look().usable == [3]
    of(tmp_path, "b", adopts=True).claim()
    assert of(tmp_path, "b").look().usable == [3], "once said is enough"
    with pytest.raises(IdentityError):
        of(tmp_path, "a").look()


@pytest.mark.parametrize("torn", [b"", bytes(300), b"{", b"0123456789abcdef {}"])
def test_a_torn_record_is_written_anew_by_whose_checkpoints_are_there(
    tmp_path: Path, torn: bytes
) -> None:
    write(of(tmp_path, "a"), 3, SMALL, job="a")
    of(tmp_path, "a").claim()
    path = tmp_path / "store" / OWNER
    path.write_bytes(torn)
    for refused in (of(tmp_path, "b").look, of(tmp_path, "b").claim, of(tmp_path, "b").begin_run):
        with pytest.raises(IdentityError, match="found those of 'a'"):
            refused()
    assert path.read_bytes() == torn, "who is refused changes nothing"
    assert of(tmp_path, "a").look().usable == [3]
    of(tmp_path, "a").claim()
    assert path.read_bytes() == owner_record("a")


def test_whose_it_was_the_checkpoints_of_any_run_tell(tmp_path: Path) -> None:
    write(of(tmp_path, "a"), 3, SMALL, job="a")
    assert of(tmp_path, "a").begin_run() is not None
    (tmp_path / "store" / OWNER).write_bytes(b"")
    with pytest.raises(IdentityError, match="found those of 'a'"):
        of(tmp_path, "b").claim()


def test_a_torn_record_of_a_store_without_checkpoints_is_nobody_s(tmp_path: Path) -> None:
    of(tmp_path, "a").claim()
    (tmp_path / "store" / OWNER).write_bytes(b"{")
    of(tmp_path, "b").claim()
    with pytest.raises(IdentityError, match="found those of 'b'"):
        of(tmp_path, "a").claim()


def test_a_store_whose_only_checkpoint_cannot_be_read_is_not_nobody_s(tmp_path: Path) -> None:
    written = write(of(tmp_path, "a"), 3, SMALL, job="a")
    manifest = tmp_path / "store" / written.name.directory / MANIFEST
    manifest.unlink()
    manifest.symlink_to(manifest.name)  # reading it fails, and not as if it were not there
    with pytest.raises(StoreError, match="does not say whose it is"):
        of(tmp_path, "a").claim()
    assert not (tmp_path / "store" / OWNER).exists()


def test_a_writer_that_ends_anywhere_leaves_no_half_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes visible under the record's name is whole."""
    record = tmp_path / "store" / OWNER
    seen = []

    def watched(call: str) -> None:
        real = getattr(os, call)

        def look(*what: Any, **how: Any) -> None:
            seen.append(record.exists())
            real(*what, **how)

        monkeypatch.setattr(os, call, look)

    watched("fsync")
    watched("link")
    of(tmp_path, "a").claim()
    assert len(seen) == 2 and not any(seen), "it is written elsewhere, and on the disk, before"
    assert [path.name for path in (tmp_path / "store").iterdir()] == [OWNER]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_where_a_file_has_one_name_only_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A mounted bucket, for one."""

    def refuse(*what: object, **how: object) -> None:
        raise OSError(number, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    store = of(tmp_path, "a")
    store.claim()
    written = write(store, 3, SMALL, job="a")
    assert store.look().usable == [3]
    with pytest.raises(StoreError, match="expected no checkpoint"):
        store.draft(written.name)
    path = tmp_path / "store" / OWNER
    with pytest.raises(FileExistsError):
        put_whole(LocalFileSystem(), str(path), b"another")
    assert path.read_bytes() == owner_record("a")


def test_a_checkpoint_of_another_job_in_a_store_that_has_an_owner_is_not_taken(
    tmp_path: Path,
) -> None:
    """Copied there by hand, say."""
    of(tmp_path, "a").claim()
    write(of(tmp_path, "a"), 3, SMALL, job="a")
    write(of(tmp_path, "b"), 500, SMALL, job="b")
    found = of(tmp_path, "a").look()
    assert found.usable == [3] and "'b'" in found.unfinished[500] and not found.damaged
    adopting = of(tmp_path, "a", adopts=True)
    assert adopting.look().usable == [500, 3]
    adopting.claim()
    assert of(tmp_path, "a").look().usable == [500, 3], "once said is enough"


def test_who_only_looks_sees_all(tmp_path: Path) -> None:
    write(of(tmp_path, "a"), 3, SMALL, job="a")
    of(tmp_path, "a").claim()
    assert steps(Store(tmp_path / "store")) == [3]
