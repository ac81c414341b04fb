"""Whether somebody lives is a question to the kernel."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from keepstep.edge.os.flock import is_held


def test_held_as_long_as_its_owner_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_held(path)
    path.touch()
    assert not is_held(path)
    owner = os.open(path, os.O_RDWR)
    fcntl.flock(owner, fcntl.LOCK_EX)
    assert is_held(path)
    os.close(owner)
    assert not is_held(path)
