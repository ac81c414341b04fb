"""Orphans: what was started with a mark in its environment is ended, whoever its parent is, and
nothing else."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from keepstep.edge.os.orphans import end_orphans

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
