"""A neighbour on the same machine who looks for the job's secret: on command lines, in
environments, in what lies in memory and on disk. Needs root, to be two users."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.training import Training
from tests.security.two_nodes import SECRET, Job, job, machines

__all__ = ["job", "machines"]  # fixtures
pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users are played"),
]

EVE = 65534
# What of the machine's processes tells her the secret, and how many there are that tell anything.
LOOKS = """
import os, pathlib, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
secret, seen = sys.stdin.buffer.read(), 0
for process in pathlib.Path("/proc").glob("[0-9]*"):
    for name in "cmdline", "environ", "comm", "status":
        try:
            told = (process / name).read_bytes()
        except OSError:
            continue
        seen += name == "cmdline" and b"keepstep" in told
        if secret in told:
            print(process / name)
print(seen)
"""


def what_eve_finds(secret: str) -> tuple[list[str], int]:
    """Where the secret stands, of all that she can read; how many processes of keepstep's she
    sees."""
    done = subprocess.run(
        [sys.executable, "-c", LOOKS, str(EVE)],
        input=secret,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    *found, seen = done.stdout.split()
    return found, int(seen)


def told_by_files(secret: str, *places: Path) -> list[str]:
    """Files with the secret in them that somebody else could read, if the directories above let
    them."""
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert files
    return [
        f"{path}, mode {path.stat().st_mode:o}"
        for path in files
        if path.stat().st_mode & 0o077 and secret.encode() in path.read_bytes()
    ]


def test_nobody_else_is_told_the_secret_of_two_nodes(job: Job) -> None:
    job.start().wait_for("nodes-awaited")
    job.start()
    job.hold()
    found, seen = what_eve_finds(SECRET)
    assert seen >= 6, "two agents, two keepers, two ranks"
    assert found == []
    assert told_by_files(SECRET, job.machines.room, job.machines.arena) == []
    for said in job.end():
        assert SECRET not in said


@pytest.mark.parametrize("variable", ["KEEPSTEP_SECRET", "IN_CODE"])
def test_nobody_else_is_told_the_secret_of_a_training(variable: str, tmp_path: Path) -> None:
    """Its keeper and the one that writes its checkpoints know it, too."""
    training = Training(tmp_path / "1", str(tmp_path / "store"), EVERY="2", **{variable: SECRET})
    training.start(6, held=4)
    training.hold()
    found, seen = what_eve_finds(SECRET)
    assert seen >= 2
    assert found == []
    assert told_by_files(SECRET, tmp_path) == []
    training.go_on()
    code, said = training.end()
    assert code == 0 and SECRET not in said, said
