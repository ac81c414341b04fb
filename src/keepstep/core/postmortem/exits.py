"""How launchers sum up: which process ended how, and which first.

Comes in: a line and the ones before it. Goes out: a `SeenExit`. torch's elastic agent writes a
block of fields for each process that failed, and one line when it sees it; ours one line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NEEDLES = ("exitcode  :", "failed (exitcode: ", "was killed by SIG", "exited with code")
AROUND_LINES = 8

CODE = re.compile(r"exitcode {0,4}: {0,4}(-?\d{1,4}) \(pid: (\d{1,9})\)")
FAILED = re.compile(r"failed \(exitcode: (-?\d{1,4})\) local_rank: (\d{1,6}) \(pid: (\d{1,9})\)")
KEEPSTEP = re.compile(
    r"\brank (\d{1,6}) (?:was killed by SIG\w{1,10} \((\d{1,3})\)|exited with code (\d{1,3}))"
)
RANK = re.compile(r"rank {1,8}: (\d{1,6})(?: \(local_rank: (\d{1,6})\))?")
HOST = re.compile(r"host {1,8}: ([\w.-]{1,120})")
SLURM_TASK = re.compile(r"error: ([\w.-]{1,120}): tasks? (\d{1,6}):")


@dataclass(frozen=True, slots=True)
class SeenExit:
    """`is_first`: the launcher saw it before any other."""

    code: int
    rank: int | None
    local: int | None
    host: str | None
    pid: int | None
    is_first: bool


def seen_exit(text: str, before: str) -> SeenExit | None:
    """The exit that this line tells of."""
    if found := FAILED.search(text):
        return SeenExit(int(found[1]), None, int(found[2]), None, int(found[3]), False)
    if found := KEEPSTEP.search(text):
        code = -int(found[2]) if found[2] else int(found[3])
        return SeenExit(code, int(found[1]), None, None, None, True)
    if not (found := CODE.search(text)):
        return None
    block = before.splitlines()[-AROUND_LINES:]
    begin = next((i for i in reversed(range(len(block))) if block[i].rstrip().endswith("]:")), 0)
    fields = "\n".join(block[begin:])
    rank, host = RANK.search(fields), HOST.search(fields)
    return SeenExit(
        int(found[1]),
        int(rank[1]) if rank else None,
        int(rank[2]) if rank and rank[2] else None,
        host[1] if host else None,
        int(found[2]),
        any("first observed failure" in line for line in block[max(0, begin - 1) : begin + 1]),
    )
