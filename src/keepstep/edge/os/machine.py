"""Machine: what this machine has free, and where others reach it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

# Beside an H200 four hash 20 to 27 GB/s, eight 37 to 45, sixteen 62, and its bus brings 55. A
# restore with sixteen took no less time than with eight.
MOST_PROOF_THREADS = 8


def proof_threads() -> int:
    """How many threads hash or copy a state at once: while the trainer waits for it, or while it
    comes from a device."""
    return min(MOST_PROOF_THREADS, len(os.sched_getaffinity(0)))


def available_bytes() -> int:
    """Memory the kernel can give without swapping, within this process's cgroup limit."""
    available = _meminfo_available()
    limit, used = (_cgroup_number(name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else min(available, max(0, limit - used))


def address_towards(host: str) -> str:
    """This machine's address on the way to `host`; no packet is sent. Raises OSError when there is
    no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))
        return str(sock.getsockname()[0])


def _meminfo_available() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_number(name: str) -> int | None:
    try:
        path = next(
            line.split(":", 2)[2].strip()
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
        return int((Path("/sys/fs/cgroup") / path.lstrip("/") / name).read_text())
    except (OSError, StopIteration, ValueError):
        return None  # no cgroup v2, or no limit ("max")
