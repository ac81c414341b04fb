"""The lock of a real job directory: one keeper has it, of the directory that is there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.config import Settings, resolve
from keepstep.edge.os.flock import is_held
from keepstep.runtime.keeper.process import JobLock
from keepstep.runtime.keeper.run import LOCK


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    config = {"job": "j", "arena_dir": str(tmp_path), "state_dir": str(tmp_path / "state")}
    return resolve(config, {"HOME": "/nowhere"}, "j")


@pytest.fixture
def lock(settings: Settings) -> Iterator[JobLock]:
    lock = JobLock(settings, "rank 0")
    yield lock
    lock.close()


def test_one_has_it_and_says_what_it_acts_on(settings: Settings, lock: JobLock) -> None:
    assert lock.take() and lock.is_of_directory()
    assert is_held(settings.job_dir / LOCK)
    [told] = [path for path in settings.job_dir.iterdir() if path.name != LOCK]
    assert json.loads(told.read_text())["redundancy"] == settings.redundancy
    other = JobLock(settings, "rank 0")
    assert not other.take() and not other.is_of_directory()
    other.close()
    assert lock.is_of_directory()
    lock.close()
    assert not is_held(settings.job_dir / LOCK)


def test_a_directory_that_was_removed_is_not_ours_any_more(
    settings: Settings, lock: JobLock
) -> None:
    lock.take()
    shutil.rmtree(settings.job_dir)
    assert not lock.is_of_directory()
    next_one = JobLock(settings, "rank 0")
    assert next_one.take()
    assert not lock.is_of_directory(), "it is the next keeper's"
    next_one.close()


def test_the_keeper_before_may_remove_the_directory_between_two_tries(
    settings: Settings, lock: JobLock
) -> None:
    before = JobLock(settings, "rank 0")
    assert before.take() and not lock.take()
    os.rename(settings.job_dir, settings.job_dir.with_name("j~ending-1"))
    before.close()
    assert lock.take() and is_held(settings.job_dir / LOCK)
