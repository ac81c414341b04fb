"""Whether somebody lives is a question to the kernel."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from keepstep.edge.os.flock import hold, is_held, leads_to


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


def test_one_holds_it_and_its_file_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    owner = hold(path)
    assert owner is not None and path.stat().st_mode & 0o777 == 0o600
    assert hold(path) is None and is_held(path)
    os.close(owner)
    again = hold(path)
    assert again is not None
    os.close(again)


def test_a_path_leads_to_a_file_until_it_is_removed_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    owner = hold(path)
    assert owner is not None and leads_to(path, owner)
    path.unlink()
    assert not leads_to(path, owner)
    path.touch()
    assert not leads_to(path, owner)
    os.close(owner)
