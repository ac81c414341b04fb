"""Agent: `keepstep run` itself. Starts the keeper and the ranks of this node, and has all find
together again when one dies.

    inbox (pidfds, signals, ranks, keeper, other nodes, clock) -> core/recovery/restarts.py (pure)
        -> tell, kill, meet, start

A rank that dies is told to the others at once: those that can stay in their process do, what is
missing is started (by the process that stands by, which has imported torch), and all meet again.
Else all ranks are killed and start anew. Here is the loop: who is heard, and which action goes to
whom. `lives.py` starts and kills, `watching.py` looks at ranks and reaps them, `replacing.py` asks
for other nodes.

Sleeps in one selector: the kernel wakes it when a rank ends, so that noticing takes no interval.
What may take long, finding a keeper and meeting the other nodes, happens on threads that post what
they found. Neither the keeper's death nor the agent's own stops a rank.
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
from keepstep.core.detection.deadlines import derive
from keepstep.core.economics.retention import parse_rules
from keepstep.core.recovery.restart_budget import Patience
from keepstep.core.recovery.restarts import CODE_AT_FAULT, Restarts
from keepstep.core.redundancy.node_safety import expendable
from keepstep.edge.os.journal import Journal
from keepstep.edge.probes.devices import visible_devices
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import read_node_safety
from keepstep.edge.torch.ranks import Ranks
from keepstep.edge.torch.rendezvous import local_address
from keepstep.errors import ConfigError
from keepstep.model.failure import Cause, Failure, Finding, parse_budget
from keepstep.model.launch import Launch
from keepstep.model.mesh import Member
from keepstep.model.messages.agent_rank import (
    ConnectionSuspect,
    RankHere,
    Regrouped,
    StandbyReady,
)
from keepstep.model.messages.keeper_agent import MeshKnown, PeerDead
from keepstep.model.restarts import (
    Action,
    AllEndedWell,
    AwaitOthers,
    End,
    Event,
    Exit,
    MeetingLost,
    Progressed,
    RanksExited,
    RanksStarted,
    RanksUndead,
    Reported,
    RestartAll,
    RoundWanted,
    SignalRanks,
    SignalReceived,
    Stopped,
    Tell,
    TimeUp,
)
from keepstep.model.rounds import Verdict
from keepstep.model.units import S_NS
from keepstep.runtime.agent.enforcer import Watching
from keepstep.runtime.agent.keeper_client import AgentLink
from keepstep.runtime.agent.metrics import Metrics
from keepstep.runtime.agent.node_replacement import Replacing
from keepstep.runtime.agent.orphans import end_predecessors_ranks
from keepstep.runtime.agent.rank_group import Lives
from keepstep.runtime.agent.rank_server import RankLines
from keepstep.runtime.agent.rendezvous import Alone, Formed, Heard, Meeting, Several
from keepstep.runtime.agent.supervisor import SIGNALS, SUCCEEDS, say_last_word
from keepstep.runtime.job_name import default_job
from keepstep.runtime.rank.agent_client import SOCKET
from keepstep.runtime.refused_messages import RefusedMessages

POSTED = b"\0"  # among signal numbers, which begin at 1

Post = Formed | Heard | MeetingLost | Literal["keeper is back"]


def supervise(launch: Launch, config: Config, environ: Mapping[str, str]) -> int:
    """Run the job to its end; the exit code. Raises KeepstepError when it cannot begin."""
    with _wakeup() as (reader, writer):
        return Agent(launch, config, environ, reader, writer).run()


@contextmanager
def _wakeup() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket that receives every signal's number; the handlers themselves do nothing. A shell's
    `nohup` stays respected."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    caught = [
        s for s in SIGNALS if not (s == signal.SIGHUP and signal.getsignal(s) == signal.SIG_IGN)
    ]
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

    def __init__(
        self,
        launch: Launch,
        config: Config,
        environ: Mapping[str, str],
        reader: socket.socket,
        writer: socket.socket,
    ) -> None:
        handed_down = {"KEEPSTEP_AGENT": str(os.getpid())}
        self._environ, self._succeeds = environ, environ.get(SUCCEEDS) == "1"
        self.settings = resolve(
            config, {**environ, **handed_down}, launch.job or default_job(launch.argv, environ)
        )
        parse_rules(self.settings.keep)
        if launch.least_nodes < launch.nodes and self.settings.store is None:
            raise ConfigError(
                f"--nnodes {launch.least_nodes}:{launch.nodes}: expected a store (--store), "
                "since a job of another size resumes from a "
                "checkpoint, found none"
            )
        self.journal = Journal(self.settings.journal_path, "agent")
        self._metrics = Metrics(self.settings)
        if self.settings.metrics_port is not None:
            self._metrics.start(self.settings.metrics_port)
        self.launch, self._reader, self._writer = launch, reader, writer
        self._posted: deque[Post] = deque()
        patience = Patience(parse_budget(self.settings.budget))
        self.restarts = Restarts(
            launch.ranks, launch.max_restarts, self.settings.store is not None, patience
        )
        self.selector = selectors.DefaultSelector()
        socket_path = self.settings.job_dir / "agent.sock"
        rank_config = replace(config, job=self.settings.job)
        # What cannot be is said before a keeper is there.
        self.ranks = Ranks(
            launch,
            self.settings.job,
            {**rank_config.to_env(), **handed_down, SOCKET: str(socket_path)},
        )
        self.keeper = AgentLink(self.settings, self.journal, lambda: self._post("keeper is back"))
        refused = RefusedMessages(self.journal)
        self.lines = RankLines(socket_path, self.selector, refused)
        self.meeting: Meeting
        host = self.settings.host or (
            os.uname().nodename if launch.endpoint is None else local_address(launch.endpoint)
        )
        if launch.endpoint is None:
            self.meeting = Alone(launch, self._post)
        else:
            self.keeper.listen(host)
            self.meeting = Several(launch, self.settings, self.journal, self._post)
        self.selector.register(reader, selectors.EVENT_READ, "woken")
        self._listen_to_keeper()
        self._deadlines = derive(
            self.settings.hang_after_s, self.settings.link_dead_s if launch.nodes > 1 else None
        )
        seen = (self.settings, self.journal, self._deadlines)
        self.watching = Watching(*seen, self.ranks, self.lines, host, visible_devices(environ))
        self.lives = Lives(launch, *seen, self.selector, self.ranks, self.lines, self.watching)
        self.replacing = Replacing(self.settings, self.journal)
        self._deadline_ns: int | None = None  # of the last action
        self._mesh_round: int | None = None  # by which the keeper knows the round
        self._members: tuple[Member, ...] = ()  # its nodes, when there are several

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
            why = (
                f"job {self.settings.job}: {self.launch.ranks} ranks{nodes} of `{command}`, at "
                f"most {self.launch.max_restarts} restarts"
            )
            budget = self.settings.budget
            self.journal.record(
                "job-started",
                why,
                pid=os.getpid(),
                job=self.settings.job,
                ranks=self.launch.ranks,
                budget=budget,
            )
            if self._succeeds:
                self._take_over()
            self.meeting.join(self.keeper.listens)
            end = self._loop()
        finally:
            self._finish(end)
        return end.exit_code

    def _take_over(self) -> None:
        attempt, ended = end_predecessors_ranks(
            self.settings.job_dir, self._deadlines.kill_ns / S_NS
        )
        self.meeting.follow(attempt)
        why = (
            f"the node's agent was killed; process {os.getpid()} takes over, has ended its "
            f"{len(ended)} ranks and starts them from memory"
        )
        self.journal.record("agent-restarted", why, logging.WARNING, pid=os.getpid(), ended=ended)

    def _loop(self) -> End:
        while True:
            until_ns = [
                at
                for at in (self._deadline_ns, self.watching.due_ns, *self.lives.due_ns)
                if at is not None
            ]
            timeout_s = max(0, min(until_ns) - time.monotonic_ns()) / S_NS if until_ns else None
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
        exited = sorted(r for r in ready if isinstance(r, int))
        if exited:
            able = self.lives.able
            exits = tuple(self._reap(rank) for rank in exited)
            yield RanksExited(
                exits, time.monotonic_ns(), self.lives.completed_step, able, self._expendable()
            )
            yield from self.lives.left_well([e.rank for e in exits if e.code == 0])
        for key in sorted(k for k in ready if isinstance(k, str) and k.startswith("line ")):
            self._hear_line(key)
        if "keeper" in ready:
            yield from self._hear_keeper()
        # behind the exits: when both tell of the same failure, the nearer one names it
        while self._posted:
            yield from self._take(self._posted.popleft())
        now_ns = time.monotonic_ns()
        if self._deadline_ns is not None and now_ns >= self._deadline_ns:
            self._deadline_ns = None
            yield TimeUp()
        yield from self.lives.look(now_ns)
        yield from self.watching.look(now_ns)
        if (
            self.restarts.awaited_step is not None
            and (step := self.watching.completed_step) is not None
        ):
            yield Progressed(step)

    def _expendable(self) -> bool:
        """Whether the other nodes' memory can do without this one, as the leading keeper last told
        of these very nodes."""
        standing = read_node_safety(MEMORY, self.settings.job_dir) if self._members else None
        return self.lives.place.node in expendable(standing, self._members)

    def _reap(self, local_rank: int) -> Exit:
        self.selector.unregister(self.ranks.pidfds[local_rank])
        return self.watching.reap(local_rank)

    def _hear_line(self, key: str) -> None:
        if key == "line server":
            self.lines.accept()
            return
        pid = int(key.removeprefix("line "))
        match self.lines.hear(pid):
            case RankHere():
                self.lives.has_its_state()
            case StandbyReady() if pid != self.ranks.standby_pid:
                self.lines.forget(pid)  # an agent's that was killed: it ends now
            case StandbyReady():
                why = f"process {pid} stands by to become a rank"
                self.journal.record("standby-ready", why, pid=pid)
            case ConnectionSuspect(rank, why):
                told = (
                    f"rank {rank} lost a connection: {why}; that alone says of no rank that it is "
                    "lost"
                )
                self.journal.record("suspicion", told, rank=rank)
            case Regrouped():
                self.lives.regrouped()

    def _hear_keeper(self) -> Iterator[Event]:
        box = self.keeper.box
        assert box is not None
        match self.keeper.hear():
            case None if self.keeper.box is None:
                self.selector.unregister(box)
            case PeerDead(version, node, why) if self._mesh_round == version:
                step = self.lives.completed_step
                self.replacing.lost(node, why)
                failure = Failure(
                    Cause.NODE, host=self.replacing.host_of(node), error="lost", completed_step=step
                )
                yield RoundWanted(
                    f"node {node} is lost: {why}",
                    time.monotonic_ns(),
                    failure,
                    step,
                    self.lives.able,
                )
            case MeshKnown(version) if self._mesh_round == version:
                self.lives.order_regroup()

    def _take(self, posted: Post) -> Iterator[Event]:
        now_ns = time.monotonic_ns()
        if isinstance(posted, Formed):
            yield Reported(posted.failures)  # it may end here
            self._start(posted)
        elif isinstance(posted, Heard):
            verdict = posted.verdict
            if verdict.kind == "again":
                yield RoundWanted(
                    verdict.why,
                    now_ns,
                    verdict.failure,
                    self.lives.completed_step,
                    verdict.keep,
                    decided=True,
                )
            elif verdict.kind == "done":
                yield AllEndedWell(verdict.why, now_ns)
            else:
                yield Stopped(verdict.why, verdict.code, verdict.signum)
        elif isinstance(posted, MeetingLost):
            self.journal.record("meeting-lost", posted.why, logging.WARNING)
            yield posted
        else:
            self.keeper.take()
            self._listen_to_keeper()

    def _start(self, formed: Formed) -> None:
        formed_ns = time.monotonic_ns()
        self.lives.enter(formed.place, formed.keep)
        self._mesh_round, hosts = None, tuple[str, ...]()
        if formed.mesh is not None:
            self._mesh_round, hosts = (
                formed.mesh.version,
                tuple(member.host for member in formed.mesh.members),
            )
            self._members = formed.mesh.members
            self.replacing.begin(formed.mesh.node, hosts)
            # and when it knows them, the ranks that stayed may ask it
            self.keeper.tell(formed.mesh)
        else:
            self.lives.order_regroup()
        started_ns = self.lives.fill(self.meeting.board(formed.place.attempt), formed_ns)
        self.restarts.handle(RanksStarted(started_ns, formed.place.first_rank, hosts))

    # -- what to do

    def _carry_out(self, action: Action) -> Action | None:
        attempt = self.lives.place.attempt
        if isinstance(action, RestartAll):
            vacant = (*self.replacing.vacant, *([self.lives.place.node] if action.leave else []))
            verdict = Verdict(
                "again",
                self._says(action.fact),
                keep=action.keep,
                failure=action.failure,
                vacant=vacant,
            )
            self.meeting.say(attempt, verdict)
            self._tell(action.finding)
            if action.keep:
                self.lives.wake(action)
            elif undead := self.lives.end(action):
                return self.restarts.handle(RanksUndead(tuple(undead)))
            self.meeting.join(self.keeper.listens, action.leave, action.failure)
            return None
        if isinstance(action, Tell):
            self._tell(action.finding)
            return None
        if isinstance(action, AwaitOthers):
            self.meeting.ended_well(attempt, action.why)
            return None
        assert isinstance(action, SignalRanks)
        self._deadline_ns = time.monotonic_ns() + action.within_ns
        self.journal.record("stopping", action.why, logging.WARNING)
        self.meeting.say(
            attempt,
            Verdict("stop", self._says(action.why), code=action.exit_code, signum=action.signum),
        )
        self.ranks.signal(action.signum)
        return None

    def _tell(self, finding: Finding | None) -> None:
        if finding is not None:
            evidence = [failure.to_json() for failure in finding.failures]
            self.journal.record(
                "recurrence", finding.why, logging.WARNING, finding=finding.kind, failures=evidence
            )

    def _says(self, what: str) -> str:
        """To the other nodes."""
        return f"node {self.lives.place.node} says: {what}"

    def _finish(self, end: End) -> None:
        self.lives.kill()
        say_last_word(self._environ, end.exit_code)
        self._tell(end.finding)
        self.journal.record(
            "job-ended",
            end.why,
            logging.INFO if end.ok else logging.ERROR,
            ok=end.ok,
            exit_code=end.exit_code,
        )
        for signum in SIGNALS:
            # only the keeper's work is left: whoever does not want to wait for it need not
            signal.signal(signum, signal.SIG_DFL)
        self.meeting.end(
            None if end.ok else Verdict("stop", self._says(end.why), code=end.exit_code)
        )
        self.keeper.end(end.ok, end.why, end.within_ns)
        self.meeting.close(end.within_ns / S_NS)
        if end.cause:
            failures = [end.cause, *(e for e in self.watching.failures if e != end.cause)]
            print(
                self.ranks.summary(
                    (e.rank - self.lives.place.first_rank, e.code) for e in failures
                ),
                file=sys.stderr,
            )
        self.ranks.close(keep_errors=end.cause is not None or end.exit_code == CODE_AT_FAULT)
        self.lines.close()
        self._metrics.stop()
        self.selector.close()
        self.journal.close()
