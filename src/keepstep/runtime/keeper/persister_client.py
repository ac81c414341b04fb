"""Persister client: the persister as a child process of the keeper. Acts go out a line each,
answers come in by the keeper's loop.

It imports torch and may die without harm: whoever waits is told so, and the next act starts another
one. One that answers what is no answer is ended, and counts as dead.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

from keepstep.config import Settings
from keepstep.core.wire.codec import MAX_MESSAGE_BYTES, NotAMessage
from keepstep.core.wire.conversations import FROM_PERSISTER, TO_PERSISTER
from keepstep.model.messages.persister import ActDone, CheckpointAct

Then = Callable[[ActDone], None]


def persister_command(settings: Settings) -> list[str]:
    """The command line of the job's persister."""
    module = "keepstep.runtime.persister.process"
    return [sys.executable, "-m", module, settings.to_text()]


class PersisterProcess:
    """One child, from its start to its end."""

    def __init__(self, command: Sequence[str]) -> None:
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._child.stdin is not None and self._child.stdout is not None
        self._stdin: IO[bytes] = self._child.stdin
        self.stdout: IO[bytes] = self._child.stdout
        self._unfinished = b""  # of the line that is coming

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether it is dead."""
        return self._child.poll() is not None

    def write(self, line: bytes) -> None:
        """A line. To one that has died it says nothing; its end is about to be read."""
        with suppress(BrokenPipeError):
            self._stdin.write(line + b"\n")
            self._stdin.flush()

    def read(self) -> list[bytes] | None:
        """The lines that are there; None when it has ended, or sends a line without an end."""
        # not `readline`: what it reads ahead wakes no selector
        found = os.read(self.stdout.fileno(), 1 << 16)
        if not found:
            return None
        *lines, self._unfinished = (self._unfinished + found).split(b"\n")
        return lines if len(self._unfinished) <= MAX_MESSAGE_BYTES else None

    def end(self) -> int:
        """End it, if it lives. Its exit code."""
        self._stdin.close()
        self.stdout.close()
        self._child.terminate()
        return self._child.wait()


class PersisterClient:
    """See `ports.Writer`. The loop calls what is registered at `selector`."""

    def __init__(self, command: Sequence[str], selector: selectors.BaseSelector) -> None:
        """`command`: starts a child, as `persister_command` does."""
        self._command, self._selector = command, selector
        self._waiting: deque[Then] = deque()  # for answers, in the order of the acts
        self._process: PersisterProcess | None = None

    @property
    def pid(self) -> int | None:
        """The child's; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Before it is asked anything: importing torch takes seconds that SIGTERM's notice may not
        have."""
        self._running()

    def _running(self) -> PersisterProcess:
        """The child, started if none is there."""
        if self._process is None:
            self._process = started = PersisterProcess(self._command)
            self._selector.register(
                started.stdout, selectors.EVENT_READ, lambda: self._hear(started)
            )
        return self._process

    def ask(self, act: CheckpointAct, then: Then) -> None:
        """See `ports.Writer`."""
        line = TO_PERSISTER.encode(act)
        process = self._running()
        if process.has_ended:
            self._lost(process, "died")
            process = self._running()  # who heard of that may have started it already
        self._waiting.append(then)
        process.write(line)

    def _hear(self, process: PersisterProcess) -> None:
        lines = process.read()
        if lines is None:
            self._lost(process, "died")
            return
        for line in lines:
            if self._process is not process:
                return  # hearing the one before has ended it
            try:
                done = FROM_PERSISTER.decode(line)
            except NotAMessage as error:
                self._lost(process, f"gave no answer ({error}) and was ended")
                return
            if self._waiting:
                self._waiting.popleft()(done)

    def _lost(self, process: PersisterProcess, how: str) -> None:
        """The child is gone, and with it everything that it was asked."""
        code = self._let_go(process)
        waiting, self._waiting = self._waiting, deque()
        for then in waiting:
            then(ActDone(False, f"the persister {how} (exit code {code})"))

    def _let_go(self, process: PersisterProcess) -> int:
        self._process = None
        self._selector.unregister(process.stdout)
        return process.end()

    def close(self) -> None:
        """See `ports.Writer`."""
        if self._process is not None:
            self._let_go(self._process)
