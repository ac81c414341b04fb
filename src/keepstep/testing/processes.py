"""Processes: whether one lives, as the kernel says."""

from __future__ import annotations

from keepstep.edge.os.process_stat import process_stat


def process_state(pid: int) -> str:
    """See `ProcessStat`; empty when there is no such process."""
    stat = process_stat(pid)
    return "" if stat is None else stat.state


def is_dead(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is None or stat.has_ended
