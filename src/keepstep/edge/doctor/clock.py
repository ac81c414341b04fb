"""Clock: what the kernel says of its clocks, and which file was written last."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from keepstep.edge.doctor.host import Host
from keepstep.model.machine_facts import ClockFacts

SOURCES = "/sys/devices/system/clocksource/clocksource0"
MOST_FILES = 1000  # looked at in a directory


def read_clock(host: Host, written: Iterable[str | Path]) -> ClockFacts:
    """`written`: directories in which processes write all the time."""
    return ClockFacts(
        is_synchronised=host.clock_synchronised(),
        source=host.text(f"{SOURCES}/current_clocksource"),
        sources=tuple((host.text(f"{SOURCES}/available_clocksource") or "").split()),
        wall_s=host.wall_s(),
        newest=_newest(host, written),
    )


def _newest(host: Host, directories: Iterable[str | Path]) -> tuple[str, float] | None:
    """When a file's inode was changed, which no program can set to a time of its own."""
    found = None
    for directory in directories:
        for name in host.names(directory)[:MOST_FILES]:
            path = f"{str(directory).rstrip('/')}/{name}"
            try:
                written_s = os.lstat(host.place(path)).st_ctime
            except OSError:
                continue
            if found is None or written_s > found[1]:
                found = path, written_s
    return found
