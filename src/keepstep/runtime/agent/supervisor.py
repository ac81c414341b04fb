"""Supervisor: what `keepstep run` is at first: the parent of the node's agent, which it replaces
when that dies.

Comes in: signals, and the agent's end. Goes out: the same signals to the agent, and the agent's
exit code. Imports no torch, and knows nothing of the job but what an agent keeps here for the one
that follows it: whatever could make the agent fail is not here. An agent that is killed, or dies of
an error in the midst of the job, is followed by another one, which ends what the first one's ranks
were doing and has them start from memory; the ranks of other nodes stay in their process. One that
dies while a signal is to end it is followed by one that ends the job in its place. Nobody follows
an agent that had said its last word: the memory may be gone by then, and what is done would be
begun from nothing. An agent that stays stopped is killed.

Invariant: at most one agent lives; when the supervisor is killed its agent dies with it, and the
ranks train on without one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keepstep.core.recovery.supervision import (
    KILLED_AFTER_LOOKS,
    LOOK_NS,
    MAX_SHORT_LIVES,
    Supervision,
    predecessor,
)
from keepstep.edge.os.orphans import end_orphans
from keepstep.edge.os.own_modules import module_words
from keepstep.edge.probes.process import read_process
from keepstep.model.launch import AGENT_SOCKET, RANK_OF, REJOIN, RUN, Predecessor
from keepstep.model.units import MS_NS, S_NS

# In the environment of an agent: its supervisor's process; the agents before it, as processes and
# attempt; the descriptor of a file in which it keeps what the next one must know.
SUPERVISOR = "KEEPSTEP_SUPERVISOR"
PREDECESSOR = "KEEPSTEP_PREDECESSOR"
REPORT = "KEEPSTEP_AGENT_REPORT"
# What an agent tells its ranks, and these whatever they start: a run that a rank has started, of
# its next job for one, is no part of this one.
TOLD_BY_AN_AGENT = frozenset(
    (
        "KEEPSTEP_AGENT",
        "KEEPSTEP_ATTEMPT",
        AGENT_SOCKET,
        PREDECESSOR,
        RANK_OF,
        REJOIN,
        REPORT,
        RUN,
        SUPERVISOR,
    )
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1
# The report: the newest attempt that the agent takes part in, -1 for none; behind it the code with
# which the job ends here, -1 when it does not.
_ATTEMPT = struct.Struct("<q")
_LAST_WORD = struct.Struct("<q")

log = logging.getLogger("keepstep")


def keep_agent(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `keepstep` with these arguments as an agent, again when it is killed; the exit code of
    the last one."""
    return _Supervisor(arguments, environ).run()


class _Supervisor:
    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = [sys.executable, *module_words("keepstep.cli.main", *arguments)]
        own = {name: value for name, value in environ.items() if name not in TOLD_BY_AN_AGENT}
        self._environ = {**own, SUPERVISOR: str(os.getpid()), RUN: secrets.token_hex(8)}
        self._supervision = Supervision()
        self._agent: subprocess.Popen[bytes] | None = None
        self._signalled: int | None = None  # the first signal that was forwarded

    def run(self) -> int:
        for signum in SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # a shell's `nohup`
                signal.signal(signum, self._forward)
        supervision = self._supervision
        before: Predecessor | None = None
        while True:
            began_ns = time.monotonic_ns()
            code, pid, attempt, last_word = self._life()
            lived_ns = time.monotonic_ns() - began_ns
            before = predecessor(before, pid, attempt, self._signalled)
            exit_code = supervision.exit_code(
                code, last_word, self._signalled, lived_ns, before.attempt
            )
            if exit_code is not None:
                if supervision.short_lives >= MAX_SHORT_LIVES:
                    log.error("supervisor: the agent %s again: giving up [KS5201]", _death(code))
                    self._end_ranks(before.pids)
                return exit_code
            log.warning("supervisor: the agent %s; another one takes over [KS5201]", _death(code))
            self._environ[PREDECESSOR] = _words_of(before)

    def _life(self) -> tuple[int, int, int, int | None]:
        """Of one agent: its exit code, its process, the newest attempt it took part in (-1: none),
        and the code with which it had said that the job ends here; None when it had not."""
        report = os.memfd_create("keepstep-agent-report")
        try:
            os.pwrite(report, _ATTEMPT.pack(-1) + _LAST_WORD.pack(-1), 0)
            # A session of its own: the terminal's Ctrl-C reaches it once, through here.
            alone: dict[str, Any] = {
                "start_new_session": True,
                "preexec_fn": _die_with_parent,
                "pass_fds": (report,),
            }
            self._agent = subprocess.Popen(
                self._command, env={**self._environ, REPORT: str(report)}, **alone
            )
            code = self._watch(self._agent)
            (attempt,) = _ATTEMPT.unpack(os.pread(report, _ATTEMPT.size, 0))
            (last_word,) = _LAST_WORD.unpack(os.pread(report, _LAST_WORD.size, _ATTEMPT.size))
        finally:
            os.close(report)
        return code, self._agent.pid, attempt, last_word if last_word >= 0 else None

    def _watch(self, agent: subprocess.Popen[bytes]) -> int:
        """Until its end: its exit code."""
        ended = select.poll()
        fd = os.pidfd_open(agent.pid)
        try:
            ended.register(fd, select.POLLIN)
            while not ended.poll(LOOK_NS // MS_NS):
                is_stopped = read_process(agent.pid).state == "stopped"
                if self._supervision.is_to_be_killed(is_stopped):
                    stopped_s = KILLED_AFTER_LOOKS * LOOK_NS // S_NS
                    told = "supervisor: agent %d has stood still for %d s: killed [KS5201]"
                    log.warning(told, agent.pid, stopped_s)
                    agent.kill()
        finally:
            os.close(fd)
        return agent.wait()

    def _end_ranks(self, agent_pids: Sequence[int]) -> None:
        """Nobody would watch them, and they would wait for each other for ever."""
        for pid in agent_pids:
            if not Path(f"/proc/{pid}").exists():  # nobody has its number by now
                end_orphans({"KEEPSTEP_AGENT": str(pid), RUN: self._environ[RUN]})

    def _forward(self, signum: int, _: Any) -> None:
        if self._signalled is None:
            self._signalled = signum
        if self._agent is not None and self._agent.poll() is None:
            self._agent.send_signal(signum)


class AgentReport:
    """What an agent keeps for the one that follows it, where it outlives the agent. Does nothing
    where there is no supervisor."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._fd = int(environ[REPORT]) if REPORT in environ else None

    def take_part(self, attempt: int) -> None:
        """Ranks of this attempt may be started from now on."""
        self._write(_ATTEMPT.pack(attempt), 0)

    def say_last_word(self, exit_code: int) -> None:
        """The job ends here, with this code."""
        self._write(_LAST_WORD.pack(exit_code & 0xFF), _ATTEMPT.size)

    def _write(self, data: bytes, at: int) -> None:
        if self._fd is not None:
            os.pwrite(self._fd, data, at)


def predecessor_of(environ: Mapping[str, str]) -> Predecessor | None:
    """The agents that were killed before this one; None for the first."""
    if PREDECESSOR not in environ:
        return None
    pids, attempt, signum = environ[PREDECESSOR].split(":")
    return Predecessor(tuple(map(int, pids.split(","))), int(attempt), int(signum))


def _death(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"died of an error (code {code})"


def _words_of(before: Predecessor) -> str:
    return f"{','.join(map(str, before.pids))}:{before.attempt}:{before.signum}"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
