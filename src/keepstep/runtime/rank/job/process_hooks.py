"""Process hooks: how a job hears that its process is told to end, ends by an exception, exits or
forks.

Comes in: SIGTERM, an uncaught exception, the interpreter's exit, a fork. Goes out: a call of what
the job does about it, and `failure`, the sentence of what the program ended of. Other programs'
hooks stay: each is called, or put back.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from keepstep.edge.os.error_file import write_error_file
from keepstep.edge.os.exit import exit_with
from keepstep.edge.os.preemption import Preemption
from keepstep.errors import UnsavedError


class ProcessHooks:
    """Of one job, from here on until `remove`."""

    def __init__(self, preempted: Callable[[], None], at_exit: Callable[[], None]) -> None:
        """preempted: on a thread of its own, when SIGTERM has arrived. at_exit: closes the job, and
        may raise UnsavedError."""
        self.failure: str | None = None
        self._close = at_exit
        self._preemption = Preemption(preempted)
        self._preemption.install()
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)

    def ignore_preemption(self) -> None:
        """The job is about to end anyway."""
        self._preemption.uninstall()

    def remove(self) -> None:
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        atexit.unregister(self._at_exit)

    # -- around a fork

    def before_fork(self) -> None:
        self._preemption.before_fork()

    def after_fork_in_parent(self) -> None:
        self._preemption.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        """The job is the parent's."""
        self._preemption.after_fork_in_child()
        atexit.unregister(self._at_exit)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        is_interrupt = issubclass(kind, KeyboardInterrupt)
        self.failure = "interrupted" if is_interrupt else f"{kind.__name__}: {error}"
        write_error_file(error, os.environ)
        self._excepthook(kind, error, trace)

    def _at_exit(self) -> None:
        try:
            with contextlib.suppress(OSError):
                self._close()
        except UnsavedError as error:
            print(f"keepstep: {error}", file=sys.stderr, flush=True)
            exit_with(1)
