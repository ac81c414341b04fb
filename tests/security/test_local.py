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
from tests.security.test_hostile_state import rewritten
from tests.security.training import Training

pytestmark = [
    pytest.mark.timeout(200),
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

# The same, with slots of hers there, and the words of a keeper: load what is there.
EVES_OFFER = """
import json, os, pathlib, socket, sys
crafted = {path: path.read_bytes() for path in map(pathlib.Path, sys.argv[5:])}
job_dir, eve, step, epoch = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:5])
os.setgid(eve); os.setuid(eve); os.umask(0)
rank = job_dir / "rank-00000"
rank.mkdir(parents=True)
for path, raw in crafted.items():
    (rank / path.name).write_bytes(raw)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(str(job_dir / "keeper.sock"))
server.listen()
print("listens", flush=True)
offer = {"kind": "offer", "offer": 1, "source": "memory", "step": step, "epoch": epoch, "why": ""}
answers = {"join": offer, "loaded": {"kind": "refused", "why": "that is all"}}
answers["failed"] = answers["loaded"]
while True:
    trainer, _ = server.accept()
    print("somebody has come", flush=True)
    while said := trainer.recv(1 << 16):
        answer = answers.get(json.loads(said)["kind"])
        if answer:
            trainer.send(json.dumps(answer).encode())
"""

# A link under the name that a job is about to use, to where it leads.
EVES_LINK = """
import os, sys
os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
name, target = sys.argv[1:3]
os.makedirs(os.path.dirname(name), exist_ok=True)
os.symlink(target, name)
"""
# Of a user without a home of any kind.
HOMELESS = """
import os, sys, torch, keepstep
os.environ.pop("HOME"); os.environ.pop("XDG_STATE_HOME")
protect = keepstep.protect  # imported as root: the user need not be able to read the library
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
job = protect({"job": sys.argv[3], "arena_dir": sys.argv[1]}, w=torch.zeros(2))
print("goes on", flush=True)
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
            timeout=100,
        )
        eve.kill()
        assert eve.stdout.read() == "", "the trainer has connected"
    assert victim.returncode != 0 and "goes on" not in victim.stdout
    assert "IdentityError" in victim.stderr
    assert f"expected a directory of user 0, found one of user {EVE}" in victim.stderr


def test_a_neighbour_who_crafts_a_memory_runs_no_code(arena: Path, tmp_path: Path) -> None:
    """Nothing in a slot is secret: whoever knows the program and the job's name can make one that
    proves, and say that it is to be loaded."""
    mark = tmp_path / "mark"
    training = Training(tmp_path / "1", str(tmp_path / "store"), "victim", KEEPSTEP_GRACE_S="300")
    crafted = rewritten(training, mark)
    newest = max(crafted.values())
    words = [job_dir_of(arena, "victim"), EVE, newest.step, newest.epoch, *crafted]
    with subprocess.Popen(
        [sys.executable, "-c", EVES_OFFER, *map(str, words)], stdout=subprocess.PIPE, text=True
    ) as eve:
        assert eve.stdout is not None and eve.stdout.readline() == "listens\n"
        code, said = training.train(10, KEEPSTEP_ARENA_DIR=str(arena))
        eve.kill()
        assert not mark.exists(), "the neighbour's code has run as the trainer's user"
        assert eve.stdout.read() == "", "the trainer has connected"
    assert code != 0 and "IdentityError" in said, said
    training.lose()


@pytest.mark.parametrize("above", [0, 1])
def test_a_link_that_a_neighbour_has_made_is_not_followed(
    above: int, arena: Path, tmp_path: Path
) -> None:
    """To a directory of the victim's own, in place of the job's directory or of the one above."""
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    (theirs / "victim").mkdir(mode=0o700)
    name = (job_dir_of(arena, "victim"), job_dir_of(arena, "victim").parent)[above]
    subprocess.run(
        [sys.executable, "-c", EVES_LINK, str(name), str(theirs), str(EVE)], check=True, timeout=100
    )
    victim = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(arena), str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert victim.returncode != 0 and "goes on" not in victim.stdout
    assert "IdentityError" in victim.stderr
    assert [path.name for path in theirs.rglob("*")] == ["victim"], "it has written there"


def test_who_has_no_home_writes_to_no_place_of_everybody_s(arena: Path) -> None:
    """Where anybody could have put what is read there: below /tmp, as an earlier version did."""
    nobody, job = 54_321, f"homeless-{os.getpid()}"
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS, str(arena), str(nobody), job],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert list(Path("/tmp/.local").rglob(job)) == []
    assert done.returncode != 0 and "goes on" not in done.stdout
    assert f"expected HOME or an entry for user {nobody} in /etc/passwd" in done.stderr


def test_what_is_written_down_is_for_its_owner_alone(arena: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(arena), str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=100,
        umask=0,
    )
    assert done.returncode == 0, done.stderr
    written = list((tmp_path / "state").rglob("*"))
    assert {path.name for path in written} >= {"victim", "journal.jsonl", "keeper.log"}
    assert [str(path) for path in written if path.stat().st_mode & 0o077] == []
