"""Persister child: the persister as a child process of the keeper: requests go out a line each,
answers come in by the keeper's loop.

It imports torch and may die without harm: whoever waits is told so, and the next request starts
another one.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from keepstep.config import Settings

Heard = Callable[[dict[str, Any]], None]


class PersisterChild:
    """See `ports.Writer`. The loop calls what is registered at `selector`."""

    def __init__(self, settings: Settings, selector: selectors.BaseSelector) -> None:
        self._settings, self._selector = settings, selector
        self._waiting: deque[Heard] = deque()  # for answers, in the order of the questions
        self._unfinished = b""  # of the answer that is coming
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Before it is asked anything: importing torch takes seconds that SIGTERM's notice may not
        have."""
        command = [
            sys.executable,
            "-m",
            "keepstep.runtime.persister.process",
            self._settings.to_text(),
        ]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._child.stdout is not None
        self._selector.register(self._child.stdout, selectors.EVENT_READ, self._hear)

    def ask(self, request: dict[str, Any], heard: Heard) -> None:
        if self._child is None or self._child.poll() is not None:
            self._lost()
            if self._child is None:  # who heard of that may have asked already
                self.start()
        assert self._child is not None and self._child.stdin is not None
        self._waiting.append(heard)
        with suppress(BrokenPipeError):  # its end is about to be heard, and answers this too
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()

    def _hear(self) -> None:
        assert self._child is not None and self._child.stdout is not None
        # not `readline`: what it reads ahead wakes no selector
        found = os.read(self._child.stdout.fileno(), 1 << 16)
        if not found:
            self._lost()
            return
        *texts, self._unfinished = (self._unfinished + found).split(b"\n")
        # hearing one may end the child
        for heard, text in [(self._waiting.popleft(), text) for text in texts]:
            heard(json.loads(text))

    def _lost(self) -> None:
        """The child is gone, and with it everything it was told."""
        if self._child is None:
            return
        code = self._child.wait()
        self._let_go()
        self._unfinished = b""
        waiting, self._waiting = self._waiting, deque()
        for heard in waiting:
            heard({"ok": False, "why": f"the persister died (exit code {code})", "there": False})

    def _let_go(self) -> None:
        assert (
            self._child is not None
            and self._child.stdin is not None
            and self._child.stdout is not None
        )
        self._selector.unregister(self._child.stdout)
        self._child.stdin.close()
        self._child.stdout.close()
        self._child = None

    def close(self) -> None:
        child = self._child
        if child is not None:
            self._let_go()
            child.terminate()
            child.wait()
