"""Signals: the signals of this process, as calls of its loop.

Comes in: signals that are asked for here. Goes out: one call for each, on the loop's thread, never
in the middle of another call. Make this before anything else is added to the loop: a terminal's
Ctrl-C ends the ranks too, and the loop has to know of the signal before it sees them end.

For the main thread, which runs the loop.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from typing import Any

from keepstep.edge.os.loop import Call, Loop


class Signals:
    """Python's own handler says which signal came; the descriptor it writes to only wakes the
    loop, whichever thread the kernel has interrupted."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._calls: dict[int, Call] = {}
        self._before: dict[int, Any] = {}  # handlers, as `signal.signal` takes them
        self._came: deque[int] = deque()
        self._pid = os.getpid()
        self._is_closed = False
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._fd_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        loop.add_reader(self._reader, self._deliver)

    def on(self, signum: int, call: Call) -> None:
        """Have the loop make this call for every such signal."""
        self._calls[signum] = call
        before = signal.signal(signum, self._take)
        self._before.setdefault(signum, before)

    def _take(self, signum: int, _: Any) -> None:
        if os.getpid() == self._pid:
            self._came.append(signum)
        else:  # a forked child has no loop: as if there had never been one
            signal.signal(signum, self._before[signum])
            os.kill(os.getpid(), signum)

    def _deliver(self) -> None:
        os.read(self._reader, 1 << 16)
        try:
            while self._came:
                self._calls[self._came.popleft()]()
        finally:
            if self._came:  # a call has raised: the others come when the loop is run again
                os.write(self._writer, b"\0")

    def close(self) -> None:
        """Give the signals back to whom they were before. Nothing the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
        os.close(self._writer)
