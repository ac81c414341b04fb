"""Signals: SIGTERM answered within milliseconds, whatever the trainer's thread is in.

A Python signal handler runs only between bytecodes, and a trainer may sit in one collective for
minutes. The C-level handler writes to the wakeup descriptor at once; a thread reads it and acts.
After acting, the process ends as SIGTERM ends it, unless the program has a handler of its own,
which then decides.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any


class Preemption:
    """Call `act` on a thread of its own when SIGTERM arrives, once."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._theirs: Any = None
        self._reader, self._writer = socket.socketpair()
        self._installed = False

    def install(self) -> None:
        """Does nothing outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._theirs = signal.signal(signal.SIGTERM, self._on_signal)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._installed = True
        threading.Thread(target=self._watch, name="keepstep-signals", daemon=True).start()

    def uninstall(self) -> None:
        if not self._installed:
            return
        self._installed = False
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._old_fd)
            if signal.getsignal(signal.SIGTERM) == self._on_signal:
                signal.signal(signal.SIGTERM, self._theirs)
        self._writer.close()

    def before_fork(self) -> None:
        """A child inherits handler and descriptor: no SIGTERM may reach it before it has dropped
        both."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_fork_in_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def after_fork_in_child(self) -> None:
        """A forked child (a data loader's worker) ends on SIGTERM as if we were not there, and does
        not wake the parent."""
        if self._installed:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._theirs)
            self._reader.close()
            self._writer.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _on_signal(self, number: int, frame: Any) -> None:
        if callable(self._theirs):
            self._theirs(number, frame)

    def _watch(self) -> None:
        while data := self._reader.recv(1):
            if self._old_fd != -1:  # somebody else (an asyncio loop) listens too
                os.write(self._old_fd, data)
            if data[0] == signal.SIGTERM:
                try:
                    self._act()
                finally:  # whatever went wrong, SIGTERM ends the process
                    if self._theirs is signal.SIG_DFL:
                        _die_of_sigterm()
                return


def _die_of_sigterm() -> None:
    # to SIG_DFL; Python's own call is for the main thread only
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)
