"""Agent: `keepstep run` itself. Starts the keeper and the ranks of this node, and restarts all ranks when one dies.

    inbox (pidfds, signals, keeper, clock) -> core/restarts.py (pure) -> kill, start, tell the keeper

Sleeps in one selector: the kernel wakes it when a rank ends, so that noticing takes no interval. Neither the keeper's death nor
the agent's own stops a rank.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from keepstep.config import Config, resolve
from keepstep.core.restarts import (
    Action,
    End,
    Event,
    Exit,
    RanksExited,
    RanksStarted,
    RanksUndead,
    RestartAll,
    Restarts,
    SignalRanks,
    SignalReceived,
    TimeUp,
)
from keepstep.core.retention import parse_rules
from keepstep.edge.journal import Journal
from keepstep.edge.status import read_status
from keepstep.edge.torch.ranks import Ranks
from keepstep.model.launch import Launch
from keepstep.model.units import S_NS, human_ns
from keepstep.runtime.agent_link import AgentLink
from keepstep.runtime.naming import default_job

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
KILL_WITHIN_S = 30.0
KEEPER_IS_BACK = b"\0"  # among signal numbers, which begin at 1


def supervise(launch: Launch, config: Config, environ: Mapping[str, str]) -> int:
    """Run the job to its end; the exit code. Raises KeepstepError when it cannot begin."""
    with _wakeup() as (reader, writer):
        return Agent(launch, config, environ, reader, writer).run()


@contextmanager
def _wakeup() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket that receives every signal's number; the handlers themselves do nothing. A shell's `nohup` stays respected."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    caught = [s for s in SIGNALS if not (s == signal.SIGHUP and signal.getsignal(s) == signal.SIG_IGN)]
    before = {s: signal.signal(s, lambda *_: None) for s in caught}
    before_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader, writer
    finally:
        signal.set_wakeup_fd(before_fd)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        reader.close()
        writer.close()


class Agent:
    """One node's agent."""

    def __init__(self, launch: Launch, config: Config, environ: Mapping[str, str], reader: socket.socket, writer: socket.socket) -> None:
        handed_down = {"KEEPSTEP_AGENT": str(os.getpid())}
        self.settings = resolve(config, {**environ, **handed_down}, default_job(launch.argv, environ))
        parse_rules(self.settings.keep)
        self.journal = Journal(self.settings.journal_path, "agent")
        self.launch, self._reader = launch, reader
        self.restarts = Restarts(launch.ranks, launch.max_restarts, self.settings.store is not None)
        rank_config = replace(config, job=self.settings.job)
        self.ranks = Ranks(launch, self.settings.job, {**rank_config.to_env(), **handed_down})
        self.keeper = AgentLink(self.settings, self.journal, lambda: _poke(writer))
        self.selector = selectors.DefaultSelector()
        self.selector.register(reader, selectors.EVENT_READ, "signals")
        self._listen_to_keeper()
        self._deadline_ns: int | None = None
        self._failures: list[Exit] = []

    def _listen_to_keeper(self) -> None:
        assert self.keeper.box is not None
        self.selector.register(self.keeper.box, selectors.EVENT_READ, "keeper")

    def run(self) -> int:
        end = End(False, 1, "the agent failed", within_ns=0)
        try:
            command = " ".join(self.launch.command)
            why = f"job {self.settings.job}: {self.launch.ranks} ranks of `{command}`, at most {self.launch.max_restarts} restarts"
            self.journal.record("job-started", why, pid=os.getpid(), job=self.settings.job, ranks=self.launch.ranks)
            self._start(attempt=0)
            end = self._loop()
        finally:
            self._finish(end)
        return end.exit_code

    def _loop(self) -> End:
        while True:
            timeout_s = None if self._deadline_ns is None else max(0, self._deadline_ns - time.monotonic_ns()) / S_NS
            ready = {key.data for key, _ in self.selector.select(timeout_s)}
            for event in self._events(ready):
                action = self.restarts.handle(event)
                while action is not None:
                    if isinstance(action, End):
                        return action
                    action = self._carry_out(action)

    # -- what happens

    def _events(self, ready: set[str | int]) -> Iterator[Event]:
        if "signals" in ready:
            for number in self._reader.recv(64):
                if bytes([number]) != KEEPER_IS_BACK:
                    yield SignalReceived(number, time.monotonic_ns())
                else:
                    self.keeper.take()
                    self._listen_to_keeper()
        exits = [self._reap(rank) for rank in sorted(r for r in ready if isinstance(r, int))]
        if exits:
            yield RanksExited(tuple(exits), time.monotonic_ns(), self._completed_step())
        if "keeper" in ready and self.keeper.box is not None:
            box = self.keeper.box
            if self.keeper.hear() is None:
                self.selector.unregister(box)
        if self._deadline_ns is not None and time.monotonic_ns() >= self._deadline_ns:
            self._deadline_ns = None
            yield TimeUp()

    def _reap(self, rank: int) -> Exit:
        pid = self.ranks.pid(rank)
        self.selector.unregister(self.ranks.pidfds[rank])
        code, message = self.ranks.reap(rank)
        found = Exit(rank, code, message)
        if code:
            self._failures.append(found)
        level = logging.WARNING if code else logging.INFO
        self.journal.record("rank-exited", f"{found} (process {pid})", level, rank=rank, pid=pid, code=code, message=message)
        return found

    def _completed_step(self) -> int | None:
        """The newest step that any rank has told of on its status page."""
        steps = []
        for rank in range(self.launch.ranks):
            status = read_status(self.settings.job_dir, rank)
            if status:
                steps.append(status.completed_step)
        return max(steps, default=None)

    # -- what to do

    def _carry_out(self, action: Action) -> Action | None:
        if isinstance(action, RestartAll):
            return self._restart(action.why)
        assert isinstance(action, SignalRanks)
        self._deadline_ns = time.monotonic_ns() + action.within_ns
        self.journal.record("stopping", action.why, logging.WARNING)
        self.ranks.signal(action.signum)
        return None

    def _start(self, attempt: int) -> dict[int, int]:
        pids = self.ranks.start(attempt)
        for rank, fd in self.ranks.pidfds.items():
            self.selector.register(fd, selectors.EVENT_READ, rank)
        self.restarts.handle(RanksStarted(time.monotonic_ns()))
        self._failures = []
        return pids

    def _restart(self, why: str) -> Action | None:
        began_ns = time.monotonic_ns()
        undead = self._kill()
        if undead:
            return self.restarts.handle(RanksUndead(tuple(undead)))
        killed_ns = time.monotonic_ns()
        pids = self._start(self.restarts.restarts)
        started_ns = time.monotonic_ns()
        why = f"{why}; all running again after {human_ns(started_ns - began_ns)}"
        took = {"kill_ns": killed_ns - began_ns, "start_ns": started_ns - killed_ns}
        self.journal.record("ranks-restarted", why, logging.WARNING, attempt=self.restarts.restarts, pids=list(pids.values()), **took)
        return None

    def _kill(self) -> list[int]:
        """SIGKILL at once: what the ranks have to lose lies in memory that outlives them."""
        for fd in self.ranks.pidfds.values():
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
        return self.ranks.kill(KILL_WITHIN_S)

    def _finish(self, end: End) -> None:
        self._kill()
        self.journal.record("job-ended", end.why, logging.INFO if end.ok else logging.ERROR, ok=end.ok, exit_code=end.exit_code)
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_DFL)  # only the keeper's work is left: whoever does not want to wait for it need not
        self.keeper.end(end.ok, end.why, end.within_ns)
        if end.cause:
            failures = [end.cause, *(e for e in self._failures if e != end.cause)]
            print(self.ranks.summary((e.rank, e.code) for e in failures), file=sys.stderr)
        self.ranks.close(keep_errors=end.cause is not None)
        self.selector.close()
        self.journal.close()


def _poke(writer: socket.socket) -> None:
    with suppress(OSError):  # the agent has ended meanwhile
        writer.send(KEEPER_IS_BACK)
