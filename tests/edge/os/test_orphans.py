"""Orphans: what was started with a mark in its environment is ended, whoever its parent is, and
nothing else."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.edge.os.orphans import end_orphans, forget_rank_mark
from keepstep.model.launch import RANK_OF

WAIT = "import sys; sys.stdin.read()"
START_ANOTHER = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {WAIT!r}], stdin=sys.stdin, start_new_session=True)
print(flush=True)
sys.stdin.read()
"""

Started = list[subprocess.Popen[bytes]]


@pytest.fixture
def started() -> Iterator[Started]:
    found: Started = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


def start(started: Started, program: str, **marks: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **marks},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    started.append(process)
    return process


def test_what_has_all_marks_is_ended_and_nothing_else(started: Started) -> None:
    mark = secrets.token_hex(8)
    ours = start(started, WAIT, MARK=mark, OTHER="1")
    others = start(started, WAIT, MARK=mark, OTHER="2")
    assert end_orphans({"MARK": mark, "OTHER": "1"}) == [ours.pid]
    assert ours.wait() == -9 and others.poll() is None


def test_what_it_has_started_in_a_session_of_its_own_is_ended_too(started: Started) -> None:
    mark = secrets.token_hex(8)
    parent = start(started, START_ANOTHER, MARK=mark)
    assert parent.stdout is not None
    parent.stdout.readline()
    assert len(end_orphans({"MARK": mark})) == 2
    assert end_orphans({"MARK": mark}) == []


END_OTHERS = """
import os, subprocess, sys
from keepstep.edge.os.orphans import end_orphans
print(end_orphans({"MARK": os.environ["MARK"]}), flush=True)
"""
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")


def said(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def test_who_ends_them_spares_itself_and_who_has_started_it(started: Started) -> None:
    """A script that a rank has left behind starts the job's next run."""
    mark = secrets.token_hex(8)
    others = start(started, WAIT, MARK=mark)
    run = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {END_OTHERS!r}])"
    script = start(started, run, MARK=mark)
    assert said(script) == f"[{others.pid}]"
    assert others.wait() == -9 and script.wait() == 0


@AS_ROOT
def test_another_users_process_is_not_ended_whatever_it_says(started: Started) -> None:
    mark = secrets.token_hex(8)
    theirs = subprocess.Popen(
        ["/bin/sh", "-c", "echo; read line"],
        env={"MARK": mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        user=12345,
    )
    started.append(theirs)
    said(theirs)
    assert end_orphans({"MARK": mark}) == [] and theirs.poll() is None


@AS_ROOT
def test_the_same_path_in_another_mount_namespace_is_another_place(
    started: Started, tmp_path: Path
) -> None:
    """As containers have it, each with a `/dev/shm` of its own and one view of processes."""
    mark = secrets.token_hex(8)
    mounts = f"mount -t tmpfs none {tmp_path} && exec {sys.executable} -c {START_SAYING!r}"
    theirs = subprocess.Popen(
        ["unshare", "--mount", "/bin/sh", "-c", mounts],
        env={**os.environ, "MARK": mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    started.append(theirs)
    said(theirs)
    ours = start(started, WAIT, MARK=mark)
    assert end_orphans({"MARK": mark}, tmp_path) == [ours.pid]
    assert theirs.poll() is None
    assert end_orphans({"MARK": mark}) == [theirs.pid]


START_SAYING = "import sys; print(flush=True); sys.stdin.read()"


def test_what_a_rank_starts_later_has_no_mark_and_its_forks_have(started: Started) -> None:
    place = f"/{secrets.token_hex(8)}"
    program = f"""
import os, subprocess, sys
from keepstep.edge.os.orphans import forget_rank_mark
forget_rank_mark(os.environ)
later = subprocess.Popen([sys.executable, "-c", {WAIT!r}], stdin=sys.stdin)
forked = os.fork()
if forked:
    print(forked, later.pid, flush=True)
sys.stdin.read()
"""
    rank = start(started, program, **{RANK_OF: place})
    forked, later = map(int, said(rank).split())
    assert end_orphans({RANK_OF: place}) == sorted([rank.pid, forked])
    assert Path(f"/proc/{later}").exists()


def test_a_rank_without_an_agent_has_nothing_to_forget() -> None:
    environ = {"HOME": "/"}
    forget_rank_mark(environ)
    assert environ == {"HOME": "/"}
