"""How launchers sum up: which process ended how, and which first.

Comes in: a line and the ones before it. Goes out: a `SeenExit`. torch's elastic agent writes a
block of fields for each process that failed, and one line when it sees it; others one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.core.postmortem.line import LogLine

LAUNCHERS = ("exitcode  :", "failed (exitcode: ", "was killed by SIG", "exited with code")
NEEDLES = (
    *LAUNCHERS,
    *("exits with return code = ", "terminated with signal SIG", "terminated with exit code "),
    *("exited on signal ", "died with <Signals.", "Exit Code: "),
)
AROUND_LINES = 8

CODE = re.compile(r"exitcode {0,4}: {0,4}(-?\d{1,4}) \(pid: (\d{1,9})\)")
FAILED = re.compile(r"failed \(exitcode: (-?\d{1,4})\) local_rank: (\d{1,6}) \(pid: (\d{1,9})\)")
KEEPSTEP = re.compile(
    r"\brank (\d{1,6}) (?:was killed by SIG\w{1,10} \((\d{1,3})\)|exited with code (\d{1,3}))"
)
RAISED = [  # in an exception's line, or an error's of a logger
    re.compile(pattern)
    for pattern in (
        r"exits with return code = (?P<code>-?\d{1,4})",  # DeepSpeed: the command it shows is any
        r"\bprocess (?P<rank>\d{1,6}) terminated with (?:signal (?P<signal>SIG[A-Z]{2,8})"
        r"|exit code (?P<code>\d{1,3}))",  # torch.multiprocessing.spawn
        r"died with <Signals\.SIG[A-Z]{2,8}: (?P<number>\d{1,3})>",  # Python's subprocess
    )
]
PLAIN = [  # at the head of a line
    re.compile(pattern)
    for pattern in (
        r"[a-z]{3,8} noticed that process rank (?P<rank>\d{1,6}) with PID (?P<pid>\d{1,9}) on node "
        r"(?P<host>[\w.-]{1,120}) exited on signal (?P<number>\d{1,3})",  # Open MPI
        r"Exit Code: {1,20}(?P<code>\d{1,3})$",  # kubectl describe
        r"Global rank (?P<rank>\d{1,6}) \(PID (?P<pid>\d{1,9})\) "
        r"exited with code (?P<code>-?\d{1,3})",  # Composer
    )
]
SIGNALS = {"SIGILL": 4, "SIGABRT": 6, "SIGBUS": 7, "SIGFPE": 8, "SIGKILL": 9, "SIGSEGV": 11}
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


def seen_exit(line: LogLine, before: str) -> SeenExit | None:
    """The exit that this line tells of."""
    text = line.text
    if found := FAILED.search(text):
        return SeenExit(int(found[1]), None, int(found[2]), None, int(found[3]), False)
    if found := KEEPSTEP.search(text):
        code = -int(found[2]) if found[2] else int(found[3])
        return SeenExit(code, int(found[1]), None, None, None, True)
    said = [form.match(line.body) for form in PLAIN]
    if line.is_exception or line.level == "ERROR":
        said += [form.search(text) for form in RAISED]
    if found := next((match for match in said if match), None):
        return _of_words(found.groupdict())
    if not (found := CODE.match(line.body)):
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


def _of_words(words: Mapping[str, str | None]) -> SeenExit | None:
    rank, pid = words.get("rank"), words.get("pid")
    code = _code(words)
    if code is None:
        return None
    return SeenExit(
        code,
        int(rank) if rank else None,
        None,
        words.get("host"),
        int(pid) if pid else None,
        rank is not None,
    )


def _code(words: Mapping[str, str | None]) -> int | None:
    if name := words.get("signal"):
        return -SIGNALS[name] if name in SIGNALS else None
    if number := words.get("number"):
        return -int(number)
    return int(words.get("code") or 0)
