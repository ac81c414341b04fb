"""Thread times: what one thread has used of a processor, and how long it was ready while others had
it.

Asked from any thread of the process. Where the kernel does not count the second, it is 0.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path


class ThreadTimes:
    """Of the thread that makes it."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self._file = os.open(
                tasks / str(threading.get_native_id()) / "schedstat", os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError:
            self._file = -1
        if self._file >= 0 and not os.pread(self._file, 64, 0).split()[1:2]:
            self.close()

    def cpu_ns(self) -> int:
        """Processor time since the thread began; a microsecond. 0 in a child that was forked: it
        has no such thread."""
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError:
            return 0

    def delay_ns(self) -> int:
        """Ready and not running, since the thread began; 2 microseconds. What it waits right now is
        not in it."""
        return int(os.pread(self._file, 64, 0).split()[1]) if self._file >= 0 else 0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
