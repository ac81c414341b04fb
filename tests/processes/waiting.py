"""Waiting: for what another process is to do."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

PAUSE_S = 0.02


def until(look: Callable[[], Any], what: str | Callable[[], str], within_s: float) -> Any:
    """What `look` finds, once it finds something. `what`: in words, or what tells how it went,
    asked only when nothing came."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(PAUSE_S)
    raise AssertionError(
        f"{what if isinstance(what, str) else what()} did not come within {within_s:.0f} s"
    )


def until_it(
    process: subprocess.Popen[Any],
    look: Callable[[], Any],
    told: Callable[[], str],
    within_s: float,
) -> Any:
    """The same, of a process that is not to end before. `told`: what it has said."""

    def lives_and_looks_so() -> Any:
        found = look()
        assert found or process.poll() is None, told()
        return found

    return until(lives_and_looks_so, told, within_s)
