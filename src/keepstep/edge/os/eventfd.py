"""Waker: has a thread that waits in a selector look up, from any other thread."""

from __future__ import annotations

import contextlib
import os


class Waker:
    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    def rest(self) -> None:
        """Awake now: what is told from here on wakes again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        os.close(self._fd)
