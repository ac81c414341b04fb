"""Process stat: what the kernel tells of a process in one line (proc(5), `stat`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_STATE, _PARENT, _USER, _SYSTEM, _BEGAN = 0, 1, 11, 12, 19  # behind the name


class ProcessStat(NamedTuple):
    """`state`: a letter (`R`, `S`, `T` stopped, `Z` dead and not yet collected, ...); `began`: when
    it was, in ticks since the machine's start. The kernel gives a process's number to another one
    later, but with another start."""

    state: str
    parent: int
    user_ticks: int
    system_ticks: int
    began: int

    @property
    def has_ended(self) -> bool:
        """Waited for or not."""
        return self.state in "ZX"


def process_stat(pid: int | str) -> ProcessStat | None:
    """None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return stat_in(text)


def stat_in(text: str) -> ProcessStat | None:
    """In that line; None where it is none."""
    fields = text.rpartition(")")[2].split()  # "12 (name, which may hold anything) S 1 ..."
    try:
        counts = (int(fields[at]) for at in (_PARENT, _USER, _SYSTEM, _BEGAN))
        return ProcessStat(fields[_STATE], *counts)
    except (IndexError, ValueError):
        return None
