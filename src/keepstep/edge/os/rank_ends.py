"""Rank ends: which processes have ended, told by the kernel at once.

Comes in: pidfds. Goes out: those that are readable, together. They lie in one epoll set, which the
loop looks at as one descriptor: what ends at the same time is told at the same time, and before
whatever else the loop has learnt to listen to later.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence


class EndWatch:
    """`fileno` is readable while a process has ended and was not yet dropped."""

    def __init__(self, ended: Callable[[Sequence[int]], None]) -> None:
        """ended: hears the keys of processes that have ended."""
        self._ended = ended
        self._set = select.epoll()
        self._pidfds: dict[int, int] = {}  # by key
        self._keys: dict[int, int] = {}  # by pidfd

    def fileno(self) -> int:
        return self._set.fileno()

    def watch(self, key: int, pid: int) -> int:
        """Tell when this process, which has not been waited for, ends; its pidfd, which is valid
        until `drop`."""
        fd = os.pidfd_open(pid)
        self._pidfds[key] = fd
        self._keys[fd] = key
        self._set.register(fd, select.EPOLLIN)
        return fd

    def pidfd(self, key: int) -> int:
        return self._pidfds[key]

    def drop(self, key: int) -> None:
        """It is not watched any more."""
        fd = self._pidfds.pop(key)
        del self._keys[fd]
        self._set.unregister(fd)
        os.close(fd)

    def look(self) -> None:
        """Tell of those that have ended; called when `fileno` is readable."""
        ready = [self._keys[fd] for fd, _ in self._set.poll(0) if fd in self._keys]
        if ready:
            self._ended(sorted(ready))

    def close(self) -> None:
        for key in list(self._pidfds):
            self.drop(key)
        self._set.close()
