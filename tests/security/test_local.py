"""A neighbour on the same machine: another user's process has made first what a job is about to
use. Needs root, to be two users."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.config import job_dir_of

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users are played"),
]

EVE = 65534
PROGRAM = """
import sys, torch, keepstep
config = {"job": "victim", "arena_dir": sys.argv[1], "state_dir": sys.argv[2]}
job = keepstep.protect(config, model=torch.nn.Linear(2, 2))
print("goes on", flush=True)
"""
# Makes what is named, listens there as a keeper would, and tells who has come.
EVES_KEEPER = """
import os, socket, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
job_dir = sys.argv[1]
os.makedirs(job_dir)
os.chmod(os.path.dirname(job_dir), 0o777); os.chmod(job_dir, 0o777)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(job_dir + "/keeper.sock")
os.chmod(job_dir + "/keeper.sock", 0o777)
server.listen()
print("listens", flush=True)
server.settimeout(60)
server.accept()
print("somebody has come", flush=True)
"""


@pytest.fixture
def arena() -> Iterator[Path]:
    """As /dev/shm, where everybody may make something, and gets there."""
    path = Path(f"/dev/shm/neighbours-{os.getpid()}")
    path.mkdir()
    path.chmod(0o1777)
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


def test_a_neighbour_who_comes_first_is_neither_heard_nor_asked(
    arena: Path, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", EVES_KEEPER, str(job_dir_of(arena, "victim")), str(EVE)],
        stdout=subprocess.PIPE,
        text=True,
    ) as eve:
        assert eve.stdout is not None and eve.stdout.readline() == "listens\n"
        victim = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(arena), str(tmp_path / "state")],
            capture_output=True,
            text=True,
            timeout=60,
        )
        eve.kill()
        assert eve.stdout.read() == "", "the trainer has connected"
    assert victim.returncode != 0 and "goes on" not in victim.stdout
    assert "IdentityError" in victim.stderr
    assert f"expected a directory of user 0, found one of user {EVE}" in victim.stderr


def test_what_is_written_down_is_for_its_owner_alone(arena: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(arena), str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=60,
        umask=0,
    )
    assert done.returncode == 0, done.stderr
    written = list((tmp_path / "state").rglob("*"))
    assert {path.name for path in written} >= {"victim", "journal.jsonl", "keeper.log"}
    assert [str(path) for path in written if path.stat().st_mode & 0o077] == []
