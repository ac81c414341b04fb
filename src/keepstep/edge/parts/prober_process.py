"""Prober process: `ports.PartProber` as a child process of the agent's (`prober.py`).

Comes in: what is to be probed. Goes out: its answers, line by line, as calls of the loop. A line
that is too long ends it. Its end and its silence are for whoever hears it to act upon.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from keepstep.edge.os.loop import Loop
from keepstep.edge.os.own_modules import module_words
from keepstep.edge.parts.probe import Targets
from keepstep.edge.parts.prober import cursors_to_text, targets_to_text
from keepstep.model.units import MIB

MODULE = "keepstep.edge.parts.prober"  # stands on its command line
MOST_BYTES = 2 * MIB
ENDS_WITHIN_S = 1.0


class ChildProber:
    """See `ports.PartProber`."""

    def __init__(self, loop: Loop, targets: Targets) -> None:
        self._loop, self._targets = loop, targets
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def pid(self) -> int | None:
        """See `ports.PartProber`."""
        return None if self._child is None else self._child.pid

    def start(
        self,
        heard: Callable[[bytes], None],
        ended: Callable[[str], None],
        cursors: Mapping[str, int],
    ) -> None:
        """See `ports.PartProber`. Raises OSError."""
        self.stop()
        given = targets_to_text(self._targets), cursors_to_text(cursors)
        command = [sys.executable, *module_words(MODULE, *given)]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdout is not None
        fd = child.stdout.fileno()
        os.set_blocking(fd, False)
        self._child, self._unread = child, b""
        self._loop.add_reader(fd, lambda: self._read(fd, heard, ended))

    def _read(self, fd: int, heard: Callable[[bytes], None], ended: Callable[[str], None]) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            heard(line)
        if not data or len(self._unread) > MOST_BYTES:
            code = self.stop()
            ended(f"the process that runs the probes ended with {code}")

    def stop(self) -> int | None:
        """See `ports.PartProber`. The code it ended with, None when it has not ended in time."""
        child, self._child = self._child, None
        if child is None:
            return None
        assert child.stdout is not None and child.stdin is not None
        self._loop.remove_reader(child.stdout.fileno())
        child.stdout.close()
        with suppress(BrokenPipeError):
            child.stdin.close()
        code = child.poll()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with the probes that it was running
        with suppress(subprocess.TimeoutExpired):
            child.wait(ENDS_WITHIN_S)
        return child.returncode if code is None else code
