"""Child process: a program that is given so many seconds, and what became of it.

Whatever it does, nobody waits longer: it runs in a session of its own, and all of that session is
killed when its time is up. Its output is bounded.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

MOST_BYTES = 1 << 20
TAIL_BYTES = 4096
DIES_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """`code`: negative, the signal that ended it; None: it did not end in time, and was killed.
    `said`: the last line on stderr."""

    code: int | None
    output: bytes
    said: str
    took_ms: int

    @property
    def why(self) -> str:
        """Why it gave nothing, for a sentence."""
        if self.code is None:
            return f"no answer within {self.took_ms / 1000:.0f} s"
        end = f"ended with {self.code}"
        if self.code < 0:
            with suppress(ValueError):
                end = f"was ended by {signal.Signals(-self.code).name}"
        return f"its process {end}{f': {self.said}' if self.said else ''}"


class RunningChild:
    """One that has been started."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Raises OSError."""
        self._begun_s = time.monotonic()
        self._output, self._errors = (os.memfd_create(name) for name in ("output", "errors"))
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._ends = select.poll()
        self._ends.register(self._pidfd, select.POLLIN)

    def end(self, within_s: float) -> ChildEnd:
        """Wait for it, since its start; then kill it, and all that it has started."""
        left_s = max(0.0, self._begun_s + within_s - time.monotonic())
        try:
            has_ended = bool(self._ends.poll(left_s * 1000))
        finally:  # by Ctrl-C, too
            self.kill()
        took_ms = round((time.monotonic() - self._begun_s) * 1000)
        code = self._process.returncode if has_ended else None
        output = os.pread(self._output, MOST_BYTES, 0)
        lines = _tail(self._errors).decode(errors="replace").strip().splitlines()
        for fd in (self._output, self._errors, self._pidfd):
            os.close(fd)
        return ChildEnd(code, output, lines[-1].strip() if lines else "", took_ms)

    def kill(self) -> None:
        """All of its session. One in a system call that cannot be interrupted is left behind."""
        if self._process.returncode is not None:  # its number may be somebody else's by now
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(DIES_WITHIN_S)


def _tail(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, TAIL_BYTES, max(0, size - TAIL_BYTES))
