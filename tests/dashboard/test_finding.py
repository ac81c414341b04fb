"""Which jobs there are, and who lives in what they left."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.config import job_dir_of
from keepstep.dashboard.finding import find_jobs, find_leftovers
from keepstep.edge.os.job_directory import claim_job_dir
from keepstep.edge.os.processes import KEEPER_MODULE
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage
from keepstep.model.snapshot import Phase


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    """Where the memory of one job is: `demo`."""
    path = tmp_path / "arena"
    path.mkdir()
    claim_job_dir(job_dir_of(path, "demo"))
    return path


def own_page(job_dir: Path, rank: int, pid: int) -> StatusPage:
    """The page of a rank that lives until it is closed."""
    page = StatusPage.own(MEMORY, job_dir, rank)
    assert page is not None
    page.publish(rank=rank, world_size=2, pid=pid, phase=Phase.FORWARD)
    return page


def test_jobs_are_found_by_memory_or_journal_newest_first(arena: Path, tmp_path: Path) -> None:
    journal = tmp_path / "state" / "old" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    journal.touch()
    os.utime(journal, (1, 1))
    claim_job_dir(job_dir_of(arena, "demo~ending-4711"))
    (arena / "something-else").mkdir()
    found = find_jobs(arena, tmp_path / "state")
    assert [(job.name, job.has_memory) for job in found] == [("demo", True), ("old", False)]
    os.utime(journal, None)
    os.utime(job_dir_of(arena, "demo"), (2, 2))
    assert [job.name for job in find_jobs(arena, tmp_path / "state")] == ["old", "demo"]


def test_what_is_no_journal_of_this_users_is_no_job(arena: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    for name in ("pipe", "directory", "stranger", "mine"):
        (state / name).mkdir(parents=True)
    os.mkfifo(state / "pipe" / "journal.jsonl")
    (state / "directory" / "journal.jsonl").mkdir()
    (state / "mine" / "journal.jsonl").touch()
    (state / "stranger" / "journal.jsonl").touch()
    if os.geteuid() == 0:
        os.chown(state / "stranger" / "journal.jsonl", 65534, 65534)
    found = {job.name for job in find_jobs(arena, state)}
    assert found - {"stranger", "demo"} == {"mine"}
    assert os.geteuid() != 0 or "stranger" not in found


def test_a_living_rank_and_a_living_keeper_hold_memory(arena: Path) -> None:
    page = own_page(job_dir_of(arena, "demo"), rank=1, pid=101)
    (job_dir_of(arena, "demo") / "held").mkdir()
    (job_dir_of(arena, "demo") / "held" / "copy").write_bytes(bytes(8192))
    [found] = find_leftovers(arena)
    assert (found.job, found.ranks_alive, found.keeper_alive) == ("demo", ((1, 101),), False)
    assert found.alive and found.bytes > found.held_bytes == 8192
    page.close()
    [found] = find_leftovers(arena)
    assert not found.alive
    with open(job_dir_of(arena, "demo") / "keeper.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        [found] = find_leftovers(arena)
    assert found.alive and found.keeper_alive and not found.ranks_alive


def test_a_keeper_that_is_removing_its_memory_lives(arena: Path) -> None:
    """It has renamed the directory after itself."""
    command = [sys.executable, "-c", "print(flush=True); input()", "-m", KEEPER_MODULE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        ending = job_dir_of(arena, f"demo~ending-{process.pid}")
        job_dir_of(arena, "demo").rename(ending)
        [found] = find_leftovers(arena)
        assert (found.job, found.path, found.keeper_alive) == ("demo", ending, True)
        process.communicate(b"\n", timeout=60)
    [found] = find_leftovers(arena)
    assert (found.job, found.alive) == ("demo", False)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users are played")
def test_a_journal_is_read_of_who_may_have_written_it(arena: Path, tmp_path: Path) -> None:
    """Where a job has memory here, it is this user's. Where it has none, the state directory may be
    another user's, whose jobs are looked at."""
    state = tmp_path / "state"
    for name in ("demo", "theirs", "mine", "in-theirs"):
        (state / name).mkdir(parents=True)
        (state / name / "journal.jsonl").touch()
    for path in (state, state / "demo", state / "theirs", state / "in-theirs"):
        os.chown(path, 65534, 65534)
    for name in ("demo", "theirs"):
        os.chown(state / name / "journal.jsonl", 65534, 65534)
    found = {job.name: job.owner for job in find_jobs(arena, state)}
    assert found == {"demo": 0, "theirs": 65534, "mine": 0}
