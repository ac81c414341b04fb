"""Thread times: what one thread has used of a processor, and how long it was ready while others had
it.

Asked from any thread of the process. Where the kernel does not count the second, it is 0. No
question lets go of Python's lock: another thread that wants it would run first, up to 5 ms, and who
only wanted to look at the clock would wait.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

_BYTES = 64  # of three numbers
_pread = ctypes.PyDLL(None).pread  # os.pread lets go of the lock
_pread.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64)
_pread.restype = ctypes.c_ssize_t


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
        self._line = ctypes.create_string_buffer(_BYTES)
        if self._file >= 0 and not os.pread(self._file, _BYTES, 0).split()[1:2]:
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
        if self._file < 0 or _pread(self._file, self._line, _BYTES - 1, 0) <= 0:
            return 0
        return int(self._line.value.split()[1])

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
