"""Live dumps of torch's flight recorder: those that ranks' own settings say where to find.

Comes in: which processes are ranks, and how new a dump must be. Goes out: by rank, the values of
its dump; nothing where there is none, or it is older, damaged, too large, or more than plain
values. torch writes one when a collective times out, under the name that the rank's environment
gives. Where it gives none nothing is looked for: torch's default is one name for all jobs of a
user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from keepstep.edge.os.recorder_dumps import read_dump
from keepstep.model.units import MIB, S_NS

PREFIXES = (b"TORCH_FR_DUMP_TEMP_FILE", b"TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the newer name first
MOST_BYTES = 16 * MIB  # a ring of 2,000 calls is some MiB; to read more would hold up the agent
MOST_ENVIRON_BYTES = MIB


def live_dumps(
    pids: Mapping[int, int], newer_than_ns: int, unpickle: Callable[[bytes], object]
) -> dict[int, object]:
    """pids: of ranks. newer_than_ns: no dump that was written longer ago counts."""
    found: dict[int, object] = {}
    for rank, pid in pids.items():
        try:
            path = _dump_of(rank, pid)
            if path is None or time.time_ns() - path.stat().st_mtime_ns > newer_than_ns + S_NS:
                continue
            document = read_dump(path, unpickle, MOST_BYTES)
        except (OSError, ValueError):
            continue  # it may be half written; nothing is known then
        if document is not None:
            found[rank] = document
    return found


def _dump_of(rank: int, pid: int) -> Path | None:
    """Raises OSError."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        words = file.read(MOST_ENVIRON_BYTES).split(b"\0")
    environ = dict(word.split(b"=", 1) for word in words if b"=" in word)
    prefix = next((environ[name] for name in PREFIXES if environ.get(name)), b"")
    return Path(f"{prefix.decode(errors='surrogateescape')}{rank}") if prefix else None
