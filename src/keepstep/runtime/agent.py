"""Agent: `keepstep run` itself. Starts the keeper and the ranks of this node, and restarts all ranks of all nodes when one dies.

    inbox (pidfds, signals, keeper, other nodes, clock) -> core/restarts.py (pure) -> kill, meet, start, tell the keeper and the others

Sleeps in one selector: the kernel wakes it when a rank ends, so that noticing takes no interval. What may take long, finding a keeper and
meeting the other nodes, happens on threads that post what they found. Neither the keeper's death nor the agent's own stops a rank.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Literal

from keepstep.config import Config, resolve
from keepstep.core.restarts import (
    Action,
    AllEndedWell,
    AwaitOthers,
    End,
    Event,
    Exit,
    MeetingLost,
    RanksExited,
    RanksStarted,
    RanksUndead,
    RestartAll,
    Restarts,
    RoundWanted,
    SignalRanks,
    SignalReceived,
    Stopped,
    TimeUp,
)
from keepstep.core.retention import parse_rules
from keepstep.edge.journal import Journal
from keepstep.edge.status import read_status
from keepstep.edge.torch.ranks import Ranks
from keepstep.edge.torch.rendezvous import local_address
from keepstep.model.launch import Launch, Place
from keepstep.model.rounds import Verdict
from keepstep.model.units import S_NS, human_ns
from keepstep.runtime.agent_link import AgentLink
from keepstep.runtime.agent_meeting import Alone, Formed, Heard, Meeting, Several
from keepstep.runtime.naming import default_job

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
KILL_WITHIN_S = 30.0
POSTED = b"\0"  # among signal numbers, which begin at 1

Post = Formed | Heard | MeetingLost | Literal["keeper is back"]


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
        self.settings = resolve(config, {**environ, **handed_down}, launch.job or default_job(launch.argv, environ))
        parse_rules(self.settings.keep)
        self.journal = Journal(self.settings.journal_path, "agent")
        self.launch, self._reader, self._writer = launch, reader, writer
        self.restarts = Restarts(launch.ranks, launch.max_restarts, self.settings.store is not None)
        rank_config = replace(config, job=self.settings.job)
        self.ranks = Ranks(launch, self.settings.job, {**rank_config.to_env(), **handed_down})
        self._posted: deque[Post] = deque()
        self.keeper = AgentLink(self.settings, self.journal, lambda: self._post("keeper is back"))
        self.meeting: Meeting
        if launch.endpoint is None:
            self.meeting = Alone(launch, self._post)
        else:
            self.keeper.listen(self.settings.host or local_address(launch.endpoint))
            self.meeting = Several(launch, self.settings, self.journal, self._post)
        self.selector = selectors.DefaultSelector()
        self.selector.register(reader, selectors.EVENT_READ, "woken")
        self._listen_to_keeper()
        self._deadline_ns: int | None = None
        self._failures: list[Exit] = []
        self._place = Place(-1, 0, launch.nodes, 0, launch.ranks, "", 0)  # of the newest life of the ranks; none yet
        self._mesh_round: int | None = None  # by which the keeper knows it
        self._restarting: tuple[str, int, int] | None = None  # why, since when, and until when the ranks were killed

    def _listen_to_keeper(self) -> None:
        if self.keeper.box is not None:  # else it died already
            self.selector.register(self.keeper.box, selectors.EVENT_READ, "keeper")

    def _post(self, what: Post) -> None:
        """From any thread."""
        self._posted.append(what)
        with suppress(OSError):  # the agent has ended meanwhile
            self._writer.send(POSTED)

    def run(self) -> int:
        end = End(False, 1, "the agent failed", within_ns=0)
        try:
            command = " ".join(self.launch.command)
            nodes = f" on each of {self.launch.nodes} nodes" if self.launch.nodes > 1 else ""
            why = f"job {self.settings.job}: {self.launch.ranks} ranks{nodes} of `{command}`, at most {self.launch.max_restarts} restarts"
            self.journal.record("job-started", why, pid=os.getpid(), job=self.settings.job, ranks=self.launch.ranks)
            self.meeting.join(self.keeper.listens)
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
        if "woken" in ready:
            for number in self._reader.recv(64):
                if bytes([number]) != POSTED:
                    yield SignalReceived(number, time.monotonic_ns())
        exits = [self._reap(rank) for rank in sorted(r for r in ready if isinstance(r, int))]
        if exits:
            yield RanksExited(tuple(exits), time.monotonic_ns(), self._completed_step())
        if "keeper" in ready:
            yield from self._hear_keeper()
        while self._posted:  # behind the exits: when both tell of the same failure, the nearer one names it
            event = self._take(self._posted.popleft())
            if event is not None:
                yield event
        if self._deadline_ns is not None and time.monotonic_ns() >= self._deadline_ns:
            self._deadline_ns = None
            yield TimeUp()

    def _hear_keeper(self) -> Iterator[Event]:
        box = self.keeper.box
        assert box is not None
        message = self.keeper.hear()
        if message is None:
            self.selector.unregister(box)
        elif message["kind"] == "peer-dead" and self._mesh_round == message["round"]:
            why = f"node {message['node']} is lost: {message['why']}"
            yield RoundWanted(why, time.monotonic_ns())

    def _take(self, posted: Post) -> Event | None:
        now_ns = time.monotonic_ns()
        if isinstance(posted, Formed):
            self._start(posted)
        elif isinstance(posted, Heard):
            verdict = posted.verdict
            if verdict.kind == "again":
                return RoundWanted(verdict.why, now_ns, verdict.crash, self._completed_step())
            return AllEndedWell(verdict.why, now_ns) if verdict.kind == "done" else Stopped(verdict.why, verdict.code, verdict.signum)
        elif isinstance(posted, MeetingLost):
            self.journal.record("meeting-lost", posted.why, logging.WARNING)
            return posted
        else:
            self.keeper.take()
            self._listen_to_keeper()
        return None

    def _reap(self, local_rank: int) -> Exit:
        pid = self.ranks.pid(local_rank)
        self.selector.unregister(self.ranks.pidfds[local_rank])
        code, message = self.ranks.reap(local_rank)
        rank = self._place.first_rank + local_rank
        found = Exit(rank, code, message)
        if code:
            self._failures.append(found)
        level = logging.WARNING if code else logging.INFO
        self.journal.record("rank-exited", f"{found} (process {pid})", level, rank=rank, pid=pid, code=code, message=message)
        return found

    def _completed_step(self) -> int | None:
        """The newest step that any rank of this node has told of on its status page."""
        first = self._place.first_rank
        found = [read_status(self.settings.job_dir, rank) for rank in range(first, first + self.launch.ranks)]
        return max((status.completed_step for status in found if status), default=None)

    # -- what to do

    def _carry_out(self, action: Action) -> Action | None:
        attempt = self._place.attempt
        if isinstance(action, RestartAll):
            self.meeting.say(attempt, Verdict("again", self._says(action.fact), action.crash))
            return self._restart(action.why)
        if isinstance(action, AwaitOthers):
            self.meeting.ended_well(attempt, action.why)
            return None
        assert isinstance(action, SignalRanks)
        self._deadline_ns = time.monotonic_ns() + action.within_ns
        self.journal.record("stopping", action.why, logging.WARNING)
        self.meeting.say(attempt, Verdict("stop", self._says(action.why), code=action.exit_code, signum=action.signum))
        self.ranks.signal(action.signum)
        return None

    def _says(self, what: str) -> str:
        """To the other nodes."""
        return f"node {self._place.node} says: {what}"

    def _restart(self, why: str) -> Action | None:
        began_ns = time.monotonic_ns()
        undead = self._kill()
        if undead:
            return self.restarts.handle(RanksUndead(tuple(undead)))
        self._restarting = (why, began_ns, time.monotonic_ns())
        self.meeting.join(self.keeper.listens)
        return None

    def _start(self, formed: Formed) -> None:
        formed_ns = time.monotonic_ns()
        self._place, self._mesh_round, self._failures = formed.place, None, []
        if formed.mesh is not None:
            self._mesh_round = formed.mesh.round
            self.keeper.tell(formed.mesh)
        pids = self.ranks.start(formed.place)
        for rank, fd in self.ranks.pidfds.items():
            self.selector.register(fd, selectors.EVENT_READ, rank)
        started_ns = time.monotonic_ns()
        self.restarts.handle(RanksStarted(started_ns, formed.place.first_rank))
        if self._restarting is not None:
            why, began_ns, killed_ns = self._restarting
            why = f"{why}; all running again after {human_ns(started_ns - began_ns)}"
            took = {"kill_ns": killed_ns - began_ns, "meet_ns": formed_ns - killed_ns, "start_ns": started_ns - formed_ns}
            attempt = formed.place.attempt
            self.journal.record("ranks-restarted", why, logging.WARNING, attempt=attempt, pids=list(pids.values()), **took)

    def _kill(self) -> list[int]:
        """SIGKILL at once: what the ranks have to lose lies in memory that outlives them."""
        for fd in self.ranks.pidfds.values():
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
        return [self._place.first_rank + rank for rank in self.ranks.kill(KILL_WITHIN_S)]

    def _finish(self, end: End) -> None:
        self._kill()
        self.journal.record("job-ended", end.why, logging.INFO if end.ok else logging.ERROR, ok=end.ok, exit_code=end.exit_code)
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_DFL)  # only the keeper's work is left: whoever does not want to wait for it need not
        self.meeting.end(None if end.ok else Verdict("stop", self._says(end.why), code=end.exit_code))
        self.keeper.end(end.ok, end.why, end.within_ns)
        self.meeting.close(end.within_ns / S_NS)
        if end.cause:
            failures = [end.cause, *(e for e in self._failures if e != end.cause)]
            print(self.ranks.summary((e.rank - self._place.first_rank, e.code) for e in failures), file=sys.stderr)
        self.ranks.close(keep_errors=end.cause is not None)
        self.selector.close()
        self.journal.close()
