"""Lock: whether a living process holds a file's flock. The kernel answers, so that a death needs no
timeout to be seen."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def is_held(path: Path) -> bool:
    """Whether a living process holds the file's flock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
