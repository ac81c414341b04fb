"""What earlier preflights brought, as far as it can be read."""

from __future__ import annotations

from pathlib import Path

from keepstep.core.preflight.history import NO_HISTORY
from keepstep.edge.preflight.history_file import history_path
from keepstep.runtime.preflight.process import keep_history, load_history


def test_a_damaged_history_counts_as_none_and_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    assert load_history(tmp_path, told.append) == NO_HISTORY and told == []
    keep_history(tmp_path, NO_HISTORY, told.append)
    assert load_history(tmp_path, told.append) == NO_HISTORY and told == []
    history_path(tmp_path).write_bytes(b"\x00garbage")
    assert load_history(tmp_path, told.append) == NO_HISTORY
    [line] = told
    assert (
        line.startswith(f"{history_path(tmp_path)} is damaged (") and "nothing of earlier" in line
    )
