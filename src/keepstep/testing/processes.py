"""Processes: whether one lives, as the kernel says."""

from __future__ import annotations

from pathlib import Path


def process_state(pid: int) -> str:
    """The letter /proc gives (`R`, `S`, `T` stopped, `Z` dead and not yet collected ...); empty
    when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_dead(pid: int) -> bool:
    return process_state(pid) in ("", "Z", "X")
