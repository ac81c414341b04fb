"""The persister's process: a line that is no message is answered, the next act is done, and it ends
with its keeper."""

from __future__ import annotations

import subprocess
from pathlib import Path

from keepstep.config import resolve
from keepstep.edge.os.persisters import persister_command
from keepstep.model.messages.keeper_rank import NotUnderstood
from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.runtime.persister.conversation import KEEPER_WITH_PERSISTER

NONSENSE = [b"", b"hello", b"[]", b"{}", b'{"kind":"act"}', b"\xff\xfe", b"[" * 10_000]


def test_any_line_is_answered(tmp_path: Path) -> None:
    settings = resolve(
        {"job": "j", "store": str(tmp_path / "store"), "arena_dir": tmp_path / "arena"}, {}, "j"
    )
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
