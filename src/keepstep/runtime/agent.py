"""Agent: `keepstep run` itself. Starts the keeper and the ranks of this node, and has all find together again when one dies.

    inbox (pidfds, signals, ranks, keeper, other nodes, clock) -> core/restarts.py (pure) -> tell, kill, meet, start

A rank that dies is told to the others at once: those that can stay in their process do, what is missing is started (by the process that
stands by, which has imported torch), and all meet again. Else all ranks are killed and start anew.

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
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Literal

from keepstep.config import Config, resolve
from keepstep.core.deadlines import derive
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
    RegroupLate,
    RestartAll,
    Restarts,
    RoundWanted,
    SignalRanks,
    SignalReceived,
    Stopped,
    TimeUp,
    signal_words,
)
from keepstep.core.retention import parse_rules
from keepstep.edge.journal import Journal
from keepstep.edge.provider import CommandProvider
from keepstep.edge.status import read_status
from keepstep.edge.torch.ranks import Ranks
from keepstep.edge.torch.rendezvous import local_address
from keepstep.model.launch import Launch, Place
from keepstep.model.lost import LostNode
from keepstep.model.rounds import Verdict
from keepstep.model.units import S_NS, human_ns
from keepstep.model.verdict import Verdict as Diagnosis
from keepstep.ports import NodeProvider
from keepstep.runtime.agent_line import REJOIN, SOCKET
from keepstep.runtime.agent_link import AgentLink
from keepstep.runtime.agent_meeting import Alone, Formed, Heard, Meeting, Several
from keepstep.runtime.metering import Metrics
from keepstep.runtime.naming import default_job
from keepstep.runtime.predecessor import end_predecessors_ranks, write_ranks
from keepstep.runtime.rank_lines import RankLines
from keepstep.runtime.standby import can_become
from keepstep.runtime.steward import SIGNALS, SUCCEEDS
from keepstep.runtime.watch import Watch

REGROUP_STARTS = 3  # times what the program takes to begin: the least it has to regroup, where that is longer than the deadline
STANDBY_AFTER_NS = 3 * S_NS  # importing torch takes a core for seconds: not while the ranks start or find together
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
        self._succeeds = environ.get(SUCCEEDS) == "1"
        self.settings = resolve(config, {**environ, **handed_down}, launch.job or default_job(launch.argv, environ))
        parse_rules(self.settings.keep)
        self.journal = Journal(self.settings.journal_path, "agent")
        self._metrics = Metrics(self.settings)
        if self.settings.metrics_port is not None:
            self._metrics.start(self.settings.metrics_port)
        self.launch, self._reader, self._writer = launch, reader, writer
        self._posted: deque[Post] = deque()
        self.restarts = Restarts(launch.ranks, launch.max_restarts, self.settings.store is not None)
        self.selector = selectors.DefaultSelector()
        socket_path = self.settings.job_dir / "agent.sock"
        rank_config = replace(config, job=self.settings.job)
        # What cannot be is said before a keeper is there.
        self.ranks = Ranks(launch, self.settings.job, {**rank_config.to_env(), **handed_down, SOCKET: str(socket_path)})
        self.keeper = AgentLink(self.settings, self.journal, lambda: self._post("keeper is back"))
        self.lines = RankLines(socket_path, self.selector)
        self._standby_wanted = bool(launch.standby) and self.ranks.may_stand_by and can_become(launch.command)
        self._standby_at_ns: int | None = None
        self.meeting: Meeting
        if launch.endpoint is None:
            self.meeting = Alone(launch, self._post)
        else:
            self.keeper.listen(self.settings.host or local_address(launch.endpoint))
            self.meeting = Several(launch, self.settings, self.journal, self._post)
        self.selector.register(reader, selectors.EVENT_READ, "woken")
        self._listen_to_keeper()
        self._deadlines = derive(self.settings.hang_after_s, self.settings.link_dead_s if launch.nodes > 1 else None)
        self.watch: Watch | None = None
        self._tick_ns: int | None = None  # when to look at the ranks again
        self._condemned: set[int] = set()  # local ranks that were killed for a verdict and have not gone yet
        self._deadline_ns: int | None = None
        self._failures: list[Exit] = []
        self._place = Place(-1, 0, launch.nodes, 0, launch.ranks, "", 0)  # of the newest life of the ranks; none yet
        self._mesh_round: int | None = None  # by which the keeper knows it
        self._hosts: list[str] = []  # of the nodes of the round
        self._lost_nodes: set[int] = set()
        self._provider: NodeProvider | None = CommandProvider(self.settings.replace_command) if self.settings.replace_command else None
        self._restarting: tuple[str, int, int] | None = None  # why, since when, and until when the ranks were killed
        self._regrouping_ns: int | None = None  # until when all ranks must have found together
        self._began_regrouping_ns: int | None = None
        self._regroup_within_ns = self._deadlines.regroup_ns
        self._started_ns = self._starting_ns = 0  # when ranks were last started, and the longest that one took until it had its state
        self._ordered = True  # the ranks that stayed have been told where to meet

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
            if self._succeeds:
                self._take_over()
            self.meeting.join(self.keeper.listens)
            end = self._loop()
        finally:
            self._finish(end)
        return end.exit_code

    def _take_over(self) -> None:
        attempt, ended = end_predecessors_ranks(self.settings.job_dir, self._deadlines.kill_ns / S_NS)
        self.meeting.follow(attempt)
        why = f"the node's agent was killed; process {os.getpid()} takes over, has ended its {len(ended)} ranks and starts them from memory"
        self.journal.record("agent-restarted", why, logging.WARNING, pid=os.getpid(), ended=ended)

    def _loop(self) -> End:
        while True:
            until_ns = [at for at in (self._deadline_ns, self._regrouping_ns, self._standby_at_ns, self._tick_ns) if at is not None]
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
            able = self._able()
            exits = tuple(self._reap(rank) for rank in exited)
            yield RanksExited(exits, time.monotonic_ns(), self._completed_step(), able)
            gone = tuple(e.rank for e in exits if e.code == 0 and e.rank not in self.lines.regrouped)
            if gone and self._regrouping_ns is not None:  # it had done its last step when the others were told of a lost one
                self._regrouping_ns = None
                yield RegroupLate(gone, 0, time.monotonic_ns())
        for key in sorted(k for k in ready if isinstance(k, str) and k.startswith("line ")):
            self._hear_line(key)
        if "keeper" in ready:
            yield from self._hear_keeper()
        while self._posted:  # behind the exits: when both tell of the same failure, the nearer one names it
            event = self._take(self._posted.popleft())
            if event is not None:
                yield event
        yield from self._look_at_clock(time.monotonic_ns())

    def _look_at_clock(self, now_ns: int) -> Iterator[Event]:
        if self._deadline_ns is not None and now_ns >= self._deadline_ns:
            self._deadline_ns = None
            yield TimeUp()
        if self._regrouping_ns is not None and now_ns >= self._regrouping_ns:
            self._regrouping_ns = None
            mine = range(self._place.first_rank, self._place.first_rank + self.launch.ranks)
            late = tuple(rank for rank in mine if rank not in self.lines.regrouped)
            if late:
                yield RegroupLate(late, self._regroup_within_ns, now_ns)
        if self._standby_at_ns is not None and now_ns >= self._standby_at_ns:
            self._standby_at_ns = None
            self.ranks.start_standby()
        if self._tick_ns is not None and now_ns >= self._tick_ns and self.watch is not None:
            self._tick_ns = now_ns + self._deadlines.tick_ns
            for verdict in self.watch.tick(now_ns):
                yield from self._carry_out_verdict(verdict, now_ns)

    def _carry_out_verdict(self, verdict: Diagnosis, now_ns: int) -> Iterator[Event]:
        """A rank that will not go on by itself is killed, and its pidfd tells of its end; if it is nobody in particular, all start anew."""
        self._tell_verdict(verdict, logging.WARNING)
        if verdict.culprit is None:
            yield RoundWanted(verdict.why, now_ns)
            return
        local_rank = verdict.culprit - self._place.first_rank
        if local_rank in self._condemned:  # killed already, and still there
            yield RanksUndead((verdict.culprit,))
        elif local_rank in self.ranks.pidfds:
            self._condemned.add(local_rank)
            with suppress(ProcessLookupError):
                os.killpg(self.ranks.pid(local_rank), signal.SIGKILL)

    def _tell_verdict(self, verdict: Diagnosis, level: int) -> None:
        about = {"kind": verdict.kind, "culprit": verdict.culprit, "state": verdict.state, "strength": str(verdict.strength)}
        self.journal.record("verdict", verdict.why, level, stalled_ns=verdict.stalled_ns, **about)

    def _able(self) -> bool:
        """Whether the node's ranks, those that have just died among them, can stay in their process."""
        return self.lines.are_able([self.ranks.pid(rank) for rank in range(self.launch.ranks)] if self._place.attempt >= 0 else [])

    def _hear_line(self, key: str) -> None:
        if key == "line server":
            self.lines.accept()
            return
        message = self.lines.hear(int(key.removeprefix("line ")))
        if message is None:
            return
        if message["kind"] == "rank":
            self._starting_ns = max(self._starting_ns, time.monotonic_ns() - self._started_ns)
        elif message["kind"] == "standby" and message["pid"] != self.ranks.standby_pid:
            self.lines.forget(message["pid"])  # an agent's that was killed: it ends now
        elif message["kind"] == "standby":
            self.journal.record("standby-ready", f"process {message['pid']} stands by to become a rank", pid=message["pid"])
        elif message["kind"] == "suspect":
            why = f"rank {message['rank']} lost a connection: {message['why']}; that alone says of no rank that it is lost"
            self.journal.record("suspicion", why, rank=message["rank"])
        elif message["kind"] == "regrouped" and len(self.lines.regrouped) == self.launch.ranks and self._regrouping_ns is not None:
            self._regrouping_ns = None
            self._standby_soon()
            if self._began_regrouping_ns is not None:  # else this node is new here
                took_ns = time.monotonic_ns() - self._began_regrouping_ns
                why = f"all ranks of this node train on {human_ns(took_ns)} after one was lost"
                self.journal.record("recovered", why, duration_ns=took_ns, attempt=self._place.attempt)

    def _standby_soon(self) -> None:
        if self._standby_wanted and self.lines.standby is None:
            self._standby_at_ns = time.monotonic_ns() + STANDBY_AFTER_NS

    def _hear_keeper(self) -> Iterator[Event]:
        box = self.keeper.box
        assert box is not None
        message = self.keeper.hear()
        if message is None:
            self.selector.unregister(box)
        elif message["kind"] == "peer-dead" and self._mesh_round == message["round"]:
            why = f"node {message['node']} is lost: {message['why']}"
            self._replace_node(int(message["node"]), str(message["why"]))
            yield RoundWanted(why, time.monotonic_ns(), able=self._able())
        elif message["kind"] == "mesh-known" and self._mesh_round == message["round"]:
            self._order_regroup()

    def _replace_node(self, node: int, why: str) -> None:
        """The first of those that are left asks for another one, so that it is asked for once."""
        self._lost_nodes.add(node)
        left = set(range(self._place.nodes)) - self._lost_nodes
        if self._provider is None or not left or self._place.node != min(left):
            return
        host = self._hosts[node] if node < len(self._hosts) else ""
        self.journal.record("replacement-wanted", f"node {node} on {host} is lost: a replacement is asked for", node=node)
        self._provider.replace(LostNode(self.settings.job, node, host, why), lambda told: self._asked_for_node(node, told))

    def _asked_for_node(self, node: int, told: str) -> None:
        """On the provider's thread."""
        self.journal.record("replacement-asked", f"a replacement of node {node}: {told}", node=node)

    def _take(self, posted: Post) -> Event | None:
        now_ns = time.monotonic_ns()
        if isinstance(posted, Formed):
            self._start(posted)
        elif isinstance(posted, Heard):
            verdict = posted.verdict
            if verdict.kind == "again":
                return RoundWanted(verdict.why, now_ns, verdict.crash, self._completed_step(), verdict.keep, decided=True)
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
        ended = self.lines.has_ended(pid)
        self.lines.forget(pid)
        self.selector.unregister(self.ranks.pidfds[local_rank])
        code, message = self.ranks.reap(local_rank)
        rank = self._place.first_rank + local_rank
        if ended and code < 0:  # by a thread of an abandoned group, say, while the interpreter was being taken down
            why = f"rank {rank} had ended its training well when it died of {signal_words(-code)}: that counts as a good end"
            self.journal.record("late-death", why, logging.WARNING, rank=rank, pid=pid, code=code)
            code = 0
        assert self.watch is not None
        verdict = self.watch.explain_exit(rank, code, message)
        self.watch.forget(rank)
        if verdict.kind == "premature-exit":
            code, message = 1, verdict.why  # the others would wait for it for ever
        if local_rank in self._condemned:
            self._condemned.discard(local_rank)
            message = verdict.why
        elif code:
            self._tell_verdict(verdict, logging.INFO)
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
            self.meeting.say(attempt, Verdict("again", self._says(action.fact), action.crash, keep=action.keep))
            if not action.keep:
                return self._restart(action)
            self._regroup(action)
            return None
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

    def _restart(self, action: RestartAll) -> Action | None:
        began_ns = time.monotonic_ns()
        self._regrouping_ns = None
        if action.refused and self._place.attempt >= 0:
            self.journal.record("refused", f"the ranks do not stay in their process: {action.refused}", rung="regroup", why=action.refused)
        undead = self._kill()
        if undead:
            return self.restarts.handle(RanksUndead(tuple(undead)))
        self._restarting = (action.why, began_ns, time.monotonic_ns())
        self.meeting.join(self.keeper.listens)
        return None

    def _regroup(self, action: RestartAll) -> None:
        """Wake the ranks that live: gloo tells only a dead one's neighbours."""
        began_ns = time.monotonic_ns()
        self.lines.lost([self.ranks.pid(rank) for rank in self.ranks.pidfds], action.fact)
        self.lines.regrouped.clear()
        self._restarting = (action.why, began_ns, began_ns)
        self._began_regrouping_ns = began_ns
        self.journal.record("plan", f"{action.why}", rung="regroup")
        self.meeting.join(self.keeper.listens)

    def _start(self, formed: Formed) -> None:
        formed_ns = time.monotonic_ns()
        before, self._place, self._mesh_round, self._failures = self._place, formed.place, None, []
        staying = set(self.ranks.pidfds) if formed.keep and before.first_rank == formed.place.first_rank else set()
        staying = {rank for rank in staying if self.lines.can_stay(self.ranks.pid(rank))}
        self._kill(set(self.ranks.pidfds) - staying)
        missing = set(range(self.launch.ranks)) - staying
        self._ordered = False
        self._lost_nodes.clear()
        self._condemned.clear()
        if formed.mesh is not None:
            self._mesh_round, self._hosts = formed.mesh.round, [member.host for member in formed.mesh.members]
            self.keeper.tell(formed.mesh)  # and when it knows them, the ranks that stayed may ask it
        else:
            self._order_regroup()
        pids = self._start_missing(missing, {REJOIN: "1"} if formed.keep else {})
        for rank in missing:
            self.selector.register(self.ranks.pidfds[rank], selectors.EVENT_READ, rank)
        started_ns = time.monotonic_ns()
        if self.watch is None or before.node != formed.place.node:
            self.watch = Watch(self.settings, self.journal, self._deadlines, formed.place.node)
        everyone = {formed.place.first_rank + rank: self.ranks.pid(rank) for rank in range(self.launch.ranks)}
        write_ranks(self.settings.job_dir, formed.place.attempt, everyone.values())
        self.watch.begin(everyone, started_ns, self.meeting.board(formed.place.attempt))
        self._tick_ns = started_ns + self._deadlines.tick_ns
        self._started_ns = started_ns
        if formed.keep:
            self.lines.joining(pids.values())
            self._regroup_within_ns = max(self._deadlines.regroup_ns, REGROUP_STARTS * self._starting_ns)
            self._regrouping_ns = started_ns + self._regroup_within_ns
        else:
            self._standby_soon()
        self.restarts.handle(RanksStarted(started_ns, formed.place.first_rank))
        if self._restarting is not None:
            why, began_ns, killed_ns = self._restarting
            why = f"{why}; all running again after {human_ns(started_ns - began_ns)}"
            took = {"kill_ns": killed_ns - began_ns, "meet_ns": formed_ns - killed_ns, "start_ns": started_ns - formed_ns}
            attempt, ids = formed.place.attempt, list(pids.values())
            self.journal.record("ranks-restarted", why, logging.WARNING, attempt=attempt, pids=ids, kept=len(staying), **took)

    def _start_missing(self, missing: set[int], environ: dict[str, str]) -> dict[int, int]:
        """The process that stands by is the first one."""
        pids = {}
        for rank in sorted(missing)[:1] if self._place.attempt > 0 else ():
            whole = {**self.ranks.environ_of(rank, self._place), **environ}
            pid = self.lines.become(self.launch.command, whole)
            if pid is not None:
                pids[rank] = self.ranks.standby_became(rank)
                why = f"process {pid}, which stood by, is rank {self._place.first_rank + rank} now"
                self.journal.record("rank-respawned", why, rank=self._place.first_rank + rank, pid=pid)
        return pids | self.ranks.start(self._place, missing - set(pids), environ)

    def _order_regroup(self) -> None:
        if not self._ordered:
            self._ordered = True
            self.lines.regroup([self.ranks.pid(rank) for rank in self.ranks.pidfds], self._place)

    def _kill(self, ranks: Collection[int] | None = None) -> list[int]:
        """SIGKILL at once: what the ranks have to lose lies in memory that outlives them. The global ranks that do not die."""
        dying = set(self.ranks.pidfds) if ranks is None else set(ranks)
        for rank in dying:
            fd = self.ranks.pidfds[rank]
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
            self.lines.forget(self.ranks.pid(rank))
            if self.watch is not None:
                self.watch.forget(self._place.first_rank + rank)
        return [self._place.first_rank + rank for rank in self.ranks.kill(self._deadlines.kill_ns / S_NS, dying)]

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
        self.lines.close()
        self._metrics.stop()
        self.selector.close()
        self.journal.close()
