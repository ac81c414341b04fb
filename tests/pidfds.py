"""Processes by their descriptors, of which there may be any number: `select` takes none beyond
1,023, and a test process that has run for long has more."""

from __future__ import annotations

import select


def ends(pidfd: int, within_s: float) -> bool:
    """Whether that process ends in time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * within_s))
