"""The job directory is ours alone, or it is not used."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.config import job_dir_of, user_dir
from keepstep.edge.os.job_directory import (
    claim_job_dir,
    is_own_job_dir,
    leave_arena,
    leave_job_dir,
)
from keepstep.errors import IdentityError, KeeperError

EVE = 12345

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="giving a file to another user needs root"
)


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    """As /dev/shm: everybody may make something there."""
    path = tmp_path / "arena"
    path.mkdir()
    path.chmod(0o1777)
    return path


def given_to_eve(path: Path) -> None:
    os.chown(path, EVE, EVE)


def open_to_others(path: Path) -> None:
    path.chmod(0o750)


def a_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def a_file(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.touch(0o700)


SPOILED = (pytest.param(given_to_eve, marks=needs_root), open_to_others, a_link, a_file)


def test_it_is_for_its_owner_alone(arena: Path) -> None:
    job_dir = job_dir_of(arena, "j")
    assert not is_own_job_dir(job_dir)
    claim_job_dir(job_dir)
    for path in (job_dir, job_dir.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    claim_job_dir(job_dir)
    assert is_own_job_dir(job_dir)


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("which", [job_dir_of, lambda arena, job: user_dir(arena)])
def test_what_somebody_else_has_made_or_may_change_is_refused(
    arena: Path, spoil: Callable[[Path], None], which: Callable[[Path, str], Path]
) -> None:
    job_dir = job_dir_of(arena, "j")
    claim_job_dir(job_dir)
    spoil(which(arena, "j"))
    assert not is_own_job_dir(job_dir)
    with pytest.raises(IdentityError, match=f"{which(arena, 'j')}: expected a directory"):
        claim_job_dir(job_dir)


def where_all_may_rename(arena: Path) -> None:
    arena.chmod(0o777)


@pytest.mark.parametrize(
    "spoil", [pytest.param(given_to_eve, marks=needs_root), where_all_may_rename]
)
def test_an_arena_in_which_others_may_rename_is_refused(
    arena: Path, spoil: Callable[[Path], None]
) -> None:
    job_dir = job_dir_of(arena, "j")
    claim_job_dir(job_dir)
    spoil(arena)
    assert not is_own_job_dir(job_dir)
    with pytest.raises(IdentityError, match="arena_dir: expected a directory of root or of user"):
        claim_job_dir(job_dir)


def test_an_arena_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeeperError, match="/j: expected a directory .*, found No such"):
        claim_job_dir(job_dir_of(tmp_path / "missing", "j"))


def test_the_last_job_to_leave_and_the_next_to_come_do_not_meet(arena: Path) -> None:
    one, two = job_dir_of(arena, "one"), job_dir_of(arena, "two")
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            claim_job_dir(one)
            one.rmdir()
            leave_arena(one.parent)

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(300):
            claim_job_dir(two)
            two.rmdir()
            leave_arena(two.parent)
    finally:
        is_over.set()
        other.join()
    assert list(arena.iterdir()) == []


@pytest.mark.parametrize("others", [False, True])
def test_who_leaves_takes_its_own_along_and_nobody_elses(arena: Path, others: bool) -> None:
    job_dir = job_dir_of(arena, "j")
    claim_job_dir(job_dir)
    (job_dir / "lock").touch()
    if others:
        (job_dir / "page").touch()
    leave_job_dir(job_dir, "lock")
    assert job_dir.exists() == others
    assert [path.name for path in arena.rglob("*") if path.is_file()] == ["page"] * others
