"""Supervisor: what `keepstep run` is at first: the parent of the node's agent, which it replaces
when that dies.

Comes in: signals, and the agent's end. Goes out: the same signals to the agent, and the agent's
exit code. Imports no torch, holds nothing, and knows nothing of the job: whatever could make the
agent fail is not here. An agent that is killed is followed by another one, which ends what the
first one's ranks were doing and has them start from memory; the ranks of other nodes stay in their
process. Nobody follows an agent that had said its last word: the memory may be gone by then, and
what is done would be begun from nothing.

Invariant: at most one agent lives; when the supervisor is killed its agent dies with it, and the
ranks train on without one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from keepstep.core.recovery.supervision import MAX_SHORT_LIVES, Supervision

SUPERVISOR = "KEEPSTEP_SUPERVISOR"  # in the environment of an agent: its supervisor's process
RESTARTED_AGENT = "KEEPSTEP_RESTARTED_AGENT"  # and that there was another one before it
# and the descriptor on which it says with which code the job ends here
LAST_WORD = "KEEPSTEP_LAST_WORD"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1

log = logging.getLogger("keepstep")


def keep_agent(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `keepstep` with these arguments as an agent, again when it is killed; the exit code of
    the last one."""
    return _Supervisor(arguments, environ).run()


class _Supervisor:
    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "keepstep.cli.main", *arguments]
        self._environ = {**environ, SUPERVISOR: str(os.getpid())}
        self._agent: subprocess.Popen[bytes] | None = None
        self._signalled: int | None = None  # the first signal that was forwarded

    def run(self) -> int:
        for signum in SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # a shell's `nohup`
                signal.signal(signum, self._forward)
        supervision = Supervision()
        while True:
            began_ns = time.monotonic_ns()
            code, last_word = self._life()
            lived_ns = time.monotonic_ns() - began_ns
            exit_code = supervision.exit_code(code, last_word, self._signalled, lived_ns)
            if exit_code is not None:
                if supervision.short_lives >= MAX_SHORT_LIVES:
                    log.error("the agent was killed by signal %d again: giving up", -code)
                return exit_code
            log.warning("the agent was killed by signal %d; another one takes over", -code)
            self._environ[RESTARTED_AGENT] = "1"

    def _life(self) -> tuple[int, int | None]:
        """Of one agent: its exit code, and the code with which it had said that the job ends here;
        None when it had not."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        # A session of its own: the terminal's Ctrl-C reaches it once, through here.
        alone: dict[str, Any] = {
            "start_new_session": True,
            "preexec_fn": _die_with_parent,
            "pass_fds": (writer,),
        }
        self._agent = subprocess.Popen(
            self._command, env={**self._environ, LAST_WORD: str(writer)}, **alone
        )
        os.close(writer)
        code = self._agent.wait()
        try:
            said = os.read(reader, 1)
        except BlockingIOError:  # somebody the agent has started holds the other end
            said = b""
        finally:
            os.close(reader)
        return code, said[0] if said else None

    def _forward(self, signum: int, _: Any) -> None:
        if self._signalled is None:
            self._signalled = signum
        if self._agent is not None and self._agent.poll() is None:
            self._agent.send_signal(signum)


def say_last_word(environ: Mapping[str, str], exit_code: int) -> None:
    """The agent to its supervisor, if it has one: the job ends here, and with this code."""
    if LAST_WORD in environ:
        with suppress(OSError):  # there is no supervisor any more
            os.write(int(environ[LAST_WORD]), bytes([exit_code & 0xFF]))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
