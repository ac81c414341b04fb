"""Children that answer, fail, hang, or leave children of their own behind."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from pathlib import Path

import pytest

from keepstep.edge.preflight.child_process import MOST_BYTES, ChildEnd, RunningChild
from keepstep.edge.preflight.history_file import NAME, read_history, write_history


def run(code: str, within_s: float = 30.0) -> ChildEnd:
    return RunningChild([sys.executable, "-c", code], os.environ).end(within_s)


def test_one_that_answers() -> None:
    end = run("print('found')")
    assert (end.code, end.output) == (0, b"found\n")


def test_one_that_fails_says_why() -> None:
    end = run("import sys; print('noise', file=sys.stderr); sys.exit('no such thing')")
    assert end.why == "its process ended with 1: no such thing"


def test_one_that_is_killed() -> None:
    end = run("import os; os.kill(os.getpid(), 7)")
    assert end.code == -signal.SIGBUS and "was ended by SIGBUS" in end.why


def test_one_that_is_followed_by_a_descriptor_beyond_those_of_select() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    many: list[int] = []
    try:
        while not many or many[-1] < 1024:  # FD_SETSIZE
            many.append(os.dup(0))
        end = run("print('found')")
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (end.code, end.output) == (0, b"found\n")


def test_one_that_hangs_is_killed_with_all_that_it_has_started() -> None:
    code = "import os, signal, sys\npid = os.fork()\nif pid: print(pid, flush=True)\nsignal.pause()"
    end = run(code, within_s=2.0)
    assert end.code is None and end.why == "no answer within 2 s"
    assert is_gone_within(int(end.output), within_s=10.0)


def is_gone_within(pid: int, within_s: float) -> bool:
    """It was killed; the kernel may take a moment."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended = select.poll()
        ended.register(fd, select.POLLIN)
        return bool(ended.poll(1000 * within_s))
    finally:
        os.close(fd)


def test_output_without_end_is_cut() -> None:
    end = run(f"import sys; sys.stdout.write('x' * {2 * MOST_BYTES})")
    assert end.code == 0 and len(end.output) == MOST_BYTES


def test_a_history_is_replaced_as_a_whole(tmp_path: Path) -> None:
    place = tmp_path / "state"
    assert read_history(place) == b""
    write_history(place, b"one")
    write_history(place, b"two")
    assert read_history(place) == b"two" and [p.name for p in place.iterdir()] == [NAME]


def test_a_history_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError):
        write_history(tmp_path / "file", b"text")


@pytest.mark.timeout(20)
def test_what_another_user_has_put_in_a_historys_place_is_none(tmp_path: Path) -> None:
    """A pipe would be waited for without end."""
    os.mkfifo(tmp_path / NAME)
    assert read_history(tmp_path) == b""
    write_history(tmp_path, b"one")
    assert read_history(tmp_path) == b"one"
    (tmp_path / NAME).rename(tmp_path / "aside")
    (tmp_path / NAME).symlink_to("aside")
    assert read_history(tmp_path) == b""
    write_history(tmp_path, b"two")
    if os.geteuid() == 0:
        os.chown(tmp_path / NAME, 65534, 65534)
        assert read_history(tmp_path) == b""
