"""The persister's process: a line that is no message is answered, the next act is done, and it ends
with its keeper, at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from keepstep.config import Settings, resolve
from keepstep.edge.os.persisters import persister_command
from keepstep.model.messages.keeper_rank import NotUnderstood
from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.runtime.persister.conversation import KEEPER_WITH_PERSISTER

NONSENSE = [b"", b"hello", b"[]", b"{}", b'{"kind":"act"}', b"\xff\xfe", b"[" * 10_000]


# Says so when its interpreter is taken apart.
TELLING = """
import atexit, sys
from keepstep.runtime.persister.process import main
atexit.register(print, "taken apart", file=sys.stderr)
main()
"""


def settings_in(tmp_path: Path) -> Settings:
    where = {"store": str(tmp_path / "store"), "arena_dir": tmp_path / "arena"}
    return resolve({"job": "j", **where}, {}, "j")


def test_any_line_is_answered(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    good = KEEPER_WITH_PERSISTER.encode(CheckpointAct("drop", 0, 3, 1, 5, (1,)))
    said = b"".join(line + b"\n" for line in [*NONSENSE, good])
    pipe = subprocess.PIPE
    with subprocess.Popen(persister_command(settings), stdin=pipe, stdout=pipe) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(said)
        child.stdin.flush()
        lines = [child.stdout.readline() for _ in range(len(NONSENSE) + 1)]
        child.stdin.close()
        assert child.stdout.read() == b"" and child.wait(timeout=60) == 0
    answers = [KEEPER_WITH_PERSISTER.decode(line) for line in lines]
    assert [type(answer) for answer in answers] == [NotUnderstood] * len(NONSENSE) + [ActDone]
    assert answers[-1].ok


def test_it_takes_nothing_apart_when_its_keeper_is_gone(tmp_path: Path) -> None:
    text = persister_command(settings_in(tmp_path))[-1]
    command = [sys.executable, "-c", TELLING, text]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert ended.returncode == 0 and b"taken apart" not in ended.stderr, ended.stderr
