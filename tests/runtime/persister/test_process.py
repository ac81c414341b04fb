"""The persister's process: a line that is no act is answered, and the next one is done."""

from __future__ import annotations

import subprocess
from pathlib import Path

from keepstep.config import resolve
from keepstep.core.wire.conversations import FROM_PERSISTER, TO_PERSISTER
from keepstep.model.messages.persister import CheckpointAct
from keepstep.runtime.keeper.persister_client import persister_command

NONSENSE = [b"", b"hello", b"[]", b"{}", b'{"kind":"act"}', b"\xff\xfe", b"[" * 10_000]


def test_any_line_is_answered(tmp_path: Path) -> None:
    settings = resolve(
        {"job": "j", "store": str(tmp_path / "store"), "arena_dir": tmp_path / "arena"}, {}, "j"
    )
    good = TO_PERSISTER.encode(CheckpointAct("drop", 0, 3, 1, 5, (1,)))
    said = b"".join(line + b"\n" for line in [*NONSENSE, good])
    done = subprocess.run(
        persister_command(settings), input=said, capture_output=True, timeout=100, check=True
    )
    answers = [FROM_PERSISTER.decode(line) for line in done.stdout.splitlines()]
    assert [answer.ok for answer in answers] == [False] * len(NONSENSE) + [True]
    assert all("not understood" in answer.why for answer in answers[:-1])
