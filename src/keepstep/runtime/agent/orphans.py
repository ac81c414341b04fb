"""Predecessor: what an agent that was killed has left: its ranks, which nobody watches.

Each agent writes down which processes its ranks are. The one that follows it ends them: their state
lies in memory, and two lives of a rank must not be.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

FILE = "ranks.json"


def write_ranks(job_dir: Path, attempt: int, pids: Collection[int]) -> None:
    """Which processes are the ranks of this node, in the `attempt`-th life of the job's ranks."""
    fresh = job_dir / f"{FILE}.new"
    with suppress(FileNotFoundError):  # the keeper has removed the directory: the job is over
        fresh.write_text(
            json.dumps({"agent": os.getpid(), "attempt": attempt, "pids": sorted(pids)})
        )
        fresh.replace(job_dir / FILE)


def end_predecessors_ranks(job_dir: Path, within_s: float) -> tuple[int, list[int]]:
    """(the newest attempt, the processes that were ended). A number that is another process's by
    now is left alone."""
    try:
        told = json.loads((job_dir / FILE).read_text())
    except (OSError, ValueError):
        return -1, []
    ended = []
    for pid in told["pids"]:
        with suppress(ProcessLookupError, PermissionError, FileNotFoundError):
            fd = os.pidfd_open(pid)
            if (
                f"KEEPSTEP_AGENT={told['agent']}\0".encode()
                in Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
            ):
                os.killpg(pid, signal.SIGKILL)
                select.select([fd], [], [], within_s)
                ended.append(pid)
            os.close(fd)
    return int(told["attempt"]), ended
