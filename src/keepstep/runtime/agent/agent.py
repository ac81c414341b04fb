"""Agent: `keepstep run` on one node, as an object over ports. Starts the keeper and the ranks of
this node, and has all find together again when one ends.

    ends of ranks, signals, messages of ranks and keeper, other nodes, the clock
    -> core/recovery/restarts.py (pure) -> tell, kill, meet, start

When a rank dies the others are told at once: those that can stay in their process do, what is
missing is started (by the process that stands by, which has imported torch), and all meet again.
Else all ranks are killed and start anew. This module only hands events to `core` and actions on:
`rank_group.py` starts and kills, `enforcer.py` looks at ranks and explains their ends,
`multi_node.py` meets the other nodes, `node_replacement.py` asks for other machines.

Comes in: events, one at a time, from the loop that drives it (`AgentWorld` says how). Neither the
keeper's death nor the agent's own stops a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from keepstep.core.recovery.restart_budget import RestartBudget
from keepstep.core.recovery.restarts import CODE_AT_FAULT, Restarts
from keepstep.core.redundancy.node_safety import expendable
from keepstep.edge.shm.node_safety_file import read_node_safety
from keepstep.errors import KeeperError, KeepstepError
from keepstep.model.attempts import Verdict
from keepstep.model.beats import AgentBeat
from keepstep.model.events import DEBUG, ERROR, INFO, WARNING
from keepstep.model.failure import Cause, Failure, Finding, parse_budget
from keepstep.model.launch import Launch, Predecessor, RankEnd
from keepstep.model.mesh import Member
from keepstep.model.restarts import (
    Action,
    AllEndedWell,
    AttemptWanted,
    AwaitOthers,
    End,
    Event,
    MeetingLost,
    PartSick,
    Progressed,
    RanksExited,
    RanksStarted,
    RanksUndead,
    Reported,
    RestartAll,
    RestoreRefused,
    SignalRanks,
    SignalReceived,
    Stopped,
    Tell,
    TimeUp,
)
from keepstep.model.units import counted
from keepstep.ports import Timer
from keepstep.runtime.agent.enforcer import Enforcer
from keepstep.runtime.agent.keeper_client import AgentKeeperClient
from keepstep.runtime.agent.multi_node import MultiNode
from keepstep.runtime.agent.node_replacement import NodeReplacement
from keepstep.runtime.agent.rank_group import RankGroup
from keepstep.runtime.agent.rank_server import RankServer
from keepstep.runtime.agent.rendezvous import Formed, JoinRequest, Rendezvous, SingleNode
from keepstep.runtime.agent.world import AgentOptions, AgentWorld
from keepstep.runtime.beat import Beat

SOCKET = "agent.sock"


class Agent:
    """One node's. `begin` comes first; `done` hears the exit code, or why the job cannot begin."""

    def __init__(
        self,
        world: AgentWorld,
        options: AgentOptions,
        launch: Launch,
        done: Callable[[int | KeepstepError], None],
    ) -> None:
        self._world = world
        self._options = options
        self._launch = launch
        self._done = done
        budget = RestartBudget(parse_budget(options.budget))
        self._restarts = Restarts(launch.ranks, launch.max_restarts, options.has_store, budget)
        self._keeper = AgentKeeperClient(world, options.job_dir, self)
        self._server = RankServer(options.job_dir / SOCKET, world.serve_boxes, self)
        self._enforcer = Enforcer(
            world, options, self._server, self._why_no_swap, lambda: self._group.swap_price
        )
        self._beat = Beat(
            world.clock,
            world.memory,
            options.job_dir,
            lambda at_ns, boot: AgentBeat(at_ns, boot, self._group.place.node),
        )
        self._group = RankGroup(
            world, options, launch, self._server, self._enforcer, self._happened
        )
        self._replacement = self._new_replacement()
        self._rendezvous: Rendezvous = (
            SingleNode(world, launch, self)
            if launch.endpoint is None
            else MultiNode(world, options, launch, self)
        )
        self._members: tuple[Member, ...] = ()  # of the attempt, when there are several nodes
        self._mesh_version: int | None = None  # by which the keeper knows them
        self._is_mesh_known = False  # to the keeper: what it says of a vote is of this attempt
        self._is_entering = False  # an attempt is formed, and its ranks are not started yet
        self._later: deque[Callable[[], None]] = deque()  # what came meanwhile
        self._time_up: Timer | None = None  # of the last action
        self._has_left = False  # its place to a spare, which may have come or not
        self._is_over = False
        self._suspecting: set[int] = set()  # ranks that lost a connection in this attempt
        self._unbuilt = ""  # what the last process that stood by could not build

    def _new_replacement(self, node: int = 0, hosts: Sequence[str] = ()) -> NodeReplacement:
        world = self._world
        return NodeReplacement(world.provider, world.journal, self._options.job, node, hosts)

    # -- beginning

    def begin(self) -> None:
        """Find the keeper, end what a killed agent has left, and take part in the first
        attempt."""
        self._world.processes.listen(self._ranks_ended)
        self._keeper.connect(self._found_keeper, self._cannot_begin)

    def _cannot_begin(self, error: KeepstepError) -> None:
        self._is_over = True
        self._server.close()
        self._world.processes.close(keep_errors=False)
        self._done(error)

    def _found_keeper(self) -> None:
        if self._launch.endpoint is None:
            self._begin_job()
            return

        def listening(why: str | None) -> None:
            if why is None:
                self._begin_job()
            else:
                self._cannot_begin(KeeperError(why))

        self._keeper.listen(self._options.host, listening)

    def _begin_job(self) -> None:
        self._server.open()
        launch, options = self._launch, self._options
        command = " ".join(launch.command)
        nodes = f" on each of {launch.nodes} nodes" if launch.nodes > 1 else ""
        why = (
            f"job {options.job}: {counted(launch.ranks, 'rank')}{nodes} of `{command}`, at most "
            f"{counted(launch.max_restarts, 'restart')}"
        )
        self._world.journal.record(
            "job-started",
            why,
            pid=self._world.pid,
            job=options.job,
            ranks=launch.ranks,
            budget=options.budget,
            takes_over=options.predecessor is not None,
        )
        if options.predecessor is None:
            self._begin_looking()
        else:
            self._take_over(options.predecessor)

    def _take_over(self, predecessor: Predecessor) -> None:
        """The ranks of the agent before are ended: nobody watches them, their state lies in memory,
        and two lives of a rank must not be."""

        def ended(pids: list[int]) -> None:
            self._rendezvous.follow(predecessor.attempt)
            signum = predecessor.signum
            then = "ends the job, as a signal was to" if signum else "starts the ranks anew"
            why = (
                f"the node's agent died; process {self._world.pid} takes over, has ended "
                f"its {len(pids)} processes and {then}"
            )
            self._world.journal.record(
                "agent-restarted", why, WARNING, pid=self._world.pid, ended=pids
            )
            if signum:
                self.signalled(signum)
            else:
                self._begin_looking()

        self._world.processes.end_orphans(predecessor.pids, ended)

    def _begin_looking(self) -> None:
        self._world.timers.after(self._options.deadlines.tick_ns, self._look)
        self._look_at_steps()
        self._join()

    def _join(self, leave: bool = False, failure: Failure | None = None) -> None:
        stays = self._group.some_can_stay
        self._rendezvous.join(JoinRequest(self._keeper.listens, leave, failure, stays))

    # -- what happens

    def _happened(self, event: Event) -> None:
        if not self._is_over:
            action = self._restarts.handle(event)
            if action is not None:
                self._carry_out(action)

    def signalled(self, signum: int) -> None:
        """A person, or the platform, wants the job to end."""
        self._happened(SignalReceived(signum, self._world.clock.monotonic_ns()))

    def _ranks_ended(self, ends: Sequence[RankEnd]) -> None:
        mine = self._group.by_themselves(ends)
        if mine and not self._is_over:
            self._ended_by_themselves(mine)
        self._group.ended([end.rank for end in ends])

    def _ended_by_themselves(self, mine: Sequence[RankEnd]) -> None:
        can_stay = self._group.can_stay  # before what has ended is forgotten
        exits = tuple(self._enforcer.explain(end) for end in mine)
        has_failed = any(exit.code for exit in exits)  # else nobody asks for what costs a look
        event = RanksExited(
            exits,
            self._world.clock.monotonic_ns(),
            self._group.completed_step if has_failed else None,
            can_stay,
            has_failed and self._is_expendable(),
        )
        self._happened(event)
        for late in self._group.ended_well([e.rank for e in exits if e.code == 0]):
            self._happened(late)
        self._some_left_early()

    def _some_left_early(self) -> None:
        """A rank that has ended well is not waited for, unless another one waits for it."""
        living = {self._group.place.first_rank + rank for rank in self._world.processes.living}
        waiting = min(self._suspecting & living, default=None)
        if waiting is None or self._is_entering or self._is_over:
            return
        exits = self._enforcer.left_early(waiting)
        if exits:
            step, now_ns = self._group.completed_step, self._world.clock.monotonic_ns()
            self._happened(RanksExited(exits, now_ns, step, False, self._is_expendable()))

    def _is_expendable(self) -> bool:
        """Whether the other nodes' memory can do without this one, as the leading keeper last told
        of these very nodes."""
        if not self._members:
            return False
        safety = read_node_safety(self._world.memory, self._options.job_dir)
        return self._group.place.node in expendable(safety, self._members)

    def _why_no_swap(self) -> str:
        """Why this node cannot leave its place to a spare for a rank that is slow."""
        if not self._members:
            return "the job has one node"
        if self._has_left:
            return "this node has left its place once before"
        if not self._is_expendable():
            return "the other nodes' memory cannot do without this one now"
        return ""

    def _look(self) -> None:
        if self._is_over:
            return
        self._world.timers.after(self._options.deadlines.tick_ns, self._look)
        self._beat.tick()
        if self._is_entering:
            return
        for event in self._enforcer.look():
            self._happened(self._with_prospects(event))
        if self._restarts.awaited_step is not None:
            step = self._enforcer.completed_step
            if step is not None:
                self._happened(Progressed(step))

    def _look_at_steps(self) -> None:
        after_ns = self._enforcer.look_at_steps_after_ns
        if self._is_over or after_ns is None:
            return
        self._world.timers.after(after_ns, self._look_at_steps)
        for event in () if self._is_entering else self._enforcer.look_at_steps():
            self._happened(event)

    def _with_prospects(self, event: Event) -> Event:
        """What of a sick part only the agent knows."""
        if not isinstance(event, PartSick):
            return event
        step = self._group.completed_step
        return replace(event, expendable=self._is_expendable(), completed_step=step)

    # -- what the ranks say

    def rank_has_state(self) -> None:
        self._group.rank_has_state()

    def rank_regrouped(self) -> None:
        self._suspecting.clear()
        self._group.rank_regrouped()

    def rank_cannot_stay(self, rank: int) -> None:
        self._group.rank_cannot_stay(rank)

    def rank_suspects(self, rank: int, why: str) -> None:
        if rank in self._suspecting:
            return  # it has several to each peer, and all end at once
        self._suspecting.add(rank)
        told = f"rank {rank} lost a connection: {why}; that alone does not say that a rank is lost"
        # For the journal alone: when a rank dies all others say so, and a line tells of its end.
        self._world.journal.record("suspicion", told, DEBUG, rank=rank)
        self._some_left_early()

    def standby_ready(self, pid: int, unbuilt: str) -> bool:
        if pid != self._world.processes.standby_pid:
            return False  # a killed agent's: it ends now
        if unbuilt and unbuilt != self._unbuilt:
            self._unbuilt = unbuilt
            told = f"the process that stands by cannot build {unbuilt}; the program will"
            self._world.journal.record("caveat", told, WARNING)
        why = f"process {pid} stands by to become a rank"
        self._world.journal.record("standby-ready", why, pid=pid)
        return True

    # -- what the keeper says

    def peer_dead(self, mesh_version: int, node: int, why: str) -> None:
        if mesh_version != self._mesh_version:
            return
        self._replacement.lost(node, why)
        step = self._group.completed_step
        host = self._replacement.host_of(node)
        failure = Failure(Cause.NODE, host=host, error="lost", completed_step=step)
        now_ns = self._world.clock.monotonic_ns()
        told = f"node {node} is lost: {why}"
        self._happened(AttemptWanted(told, now_ns, failure, step, self._group.can_stay))

    def mesh_known(self, mesh_version: int) -> None:
        if mesh_version == self._mesh_version and not self._is_entering:
            self._is_mesh_known = True
            self._group.order_regroup()

    def restore_refused(self, why: str) -> None:
        if self._mesh_version is not None and not self._is_mesh_known:
            return  # in the attempt before, which had other nodes
        here, nodes = self._group.place.nodes, self._launch.nodes
        self._happened(RestoreRefused(why, here + 1 if here < nodes else 0))

    # -- what the other nodes say

    def formed(self, formed: Formed) -> None:
        self._when_entered(lambda: self._enter(formed))

    def ended(self, verdict: Verdict) -> None:
        self._when_entered(lambda: self._heard(verdict))

    def meeting_lost(self, why: str, is_refused: bool = False) -> None:
        self._when_entered(lambda: self._lost_meeting(why, is_refused))

    def _when_entered(self, call: Callable[[], None]) -> None:
        """What the nodes say waits until the attempt that is being entered is entered."""
        if self._is_entering:
            self._later.append(call)
        elif not self._is_over:
            call()

    def _lost_meeting(self, why: str, is_refused: bool) -> None:
        self._world.journal.record("meeting-lost", why, WARNING)
        self._happened(MeetingLost(why, is_refused))

    def _heard(self, verdict: Verdict) -> None:
        now_ns = self._world.clock.monotonic_ns()
        if verdict.outcome == "again":
            step = self._group.completed_step
            self._happened(
                AttemptWanted(
                    verdict.why,
                    now_ns,
                    verdict.failure,
                    step,
                    verdict.keep,
                    decided=True,
                    wait_ns=verdict.wait_ns,
                )
            )
        elif verdict.outcome == "done":
            self._happened(AllEndedWell(verdict.why, now_ns))
        else:
            self._happened(Stopped(verdict.why, verdict.code, verdict.signum))

    def _enter(self, formed: Formed) -> None:
        formed_ns = self._world.clock.monotonic_ns()
        self._happened(Reported(formed.failures))
        if self._is_over:
            return
        self._is_entering = True

        def killed(undead: list[int]) -> None:
            self._is_entering = False
            if undead:
                self._happened(RanksUndead(tuple(undead)))
            elif not self._is_over:
                self._start(formed, formed_ns)

        self._group.enter(formed.place, formed.keep, killed)

    def _start(self, formed: Formed, formed_ns: int) -> None:
        self._suspecting.clear()
        mesh = formed.mesh
        hosts: tuple[str, ...] = ()
        if mesh is not None:
            hosts = tuple(member.host for member in mesh.members)
            self._members = mesh.members
            self._mesh_version, self._is_mesh_known = mesh.version, False
            self._replacement = self._new_replacement(mesh.node, hosts)
            self._keeper.begin_mesh(mesh)  # when it knows it, the ranks that stayed may ask
        else:
            self._group.order_regroup()
        board = self._rendezvous.board(formed.place.attempt)
        started_ns = self._group.fill(board, formed_ns)
        self._happened(RanksStarted(started_ns, formed.place.first_rank, hosts))
        while self._later and not self._is_entering:
            self._when_entered(self._later.popleft())

    # -- what to do

    def _carry_out(self, action: Action) -> None:
        match action:
            case RestartAll():
                self._restart(action)
            case Tell(finding=finding):
                self._tell(finding)
            case AwaitOthers(why=why):
                self._rendezvous.ended_well(self._group.place.attempt, why)
            case SignalRanks():
                self._signal_ranks(action)
            case End():
                self._end(action)

    def _restart(self, action: RestartAll) -> None:
        place = self._group.place
        vacant = self._replacement.vacant
        if action.leave:
            self._has_left = True
            vacant = (*vacant, place.node)
        verdict = Verdict(
            "again",
            self._for_others(action.fact),
            keep=action.keep,
            failure=action.failure,
            vacant=vacant,
            least=action.least,
            wait_ns=action.wait_ns,
        )
        self._rendezvous.say(place.attempt, verdict)
        self._tell(action.finding)
        if action.least:
            self._tell_awaited(action)
        if action.keep:
            self._group.notify(action)
            self._join(action.leave, action.failure)
            return

        def killed(undead: list[int]) -> None:
            if undead:
                self._happened(RanksUndead(tuple(undead)))
            elif not self._is_over:
                self._join(action.leave, action.failure)

        self._group.end(action, killed)

    def _tell_awaited(self, action: RestartAll) -> None:
        here, nodes = self._group.place.nodes, self._launch.nodes
        why = (
            f"{action.fact}. The job waits until at least {action.least} of its {nodes} nodes are "
            "here, and then tries again: bring the lost node back, or start the same command on "
            "another machine"
        )
        self._world.journal.record(
            "nodes-awaited", why, WARNING, here=here, nodes=nodes, least=action.least
        )

    def _tell(self, finding: Finding | None) -> None:
        if finding is not None:
            evidence = [failure.to_json() for failure in finding.failures]
            self._world.journal.record(
                "recurrence", finding.why, WARNING, finding=finding.kind, failures=evidence
            )

    def _for_others(self, what: str) -> str:
        return f"node {self._group.place.node} says: {what}"[:1000]

    def _signal_ranks(self, action: SignalRanks) -> None:
        if self._time_up is not None:
            self._time_up.cancel()
        self._time_up = self._world.timers.after(action.within_ns, lambda: self._happened(TimeUp()))
        self._world.journal.record("stopping", action.why, WARNING)
        verdict = Verdict(
            "stop", self._for_others(action.why), code=action.exit_code, signum=action.signum
        )
        self._rendezvous.say(self._group.place.attempt, verdict)
        self._world.processes.signal(action.signum)

    # -- the end

    def _end(self, end: End) -> None:
        """Kill what is left; then tell the other nodes and the keeper."""
        self._is_over = True
        if self._time_up is not None:
            self._time_up.cancel()
        self._group.kill(set(self._world.processes.living), lambda undead: self._farewell(end))

    def _farewell(self, end: End) -> None:
        world = self._world
        world.say_last_word(end.exit_code)
        self._tell(end.finding)
        level = DEBUG if end.is_told else INFO if end.ok else ERROR
        world.journal.record("job-ended", end.why, level, ok=end.ok, exit_code=end.exit_code)
        last = None
        if not end.ok:
            before = self._options.predecessor
            # of one that was killed before it could tell the others to end by it
            signum = 0 if before is None else before.signum
            last = Verdict("stop", self._for_others(end.why), code=end.exit_code, signum=signum)
        said = self._rendezvous.close(last, end.within_ns)

        def cleaned_up() -> None:
            said.when_given(lambda: self._close(end))

        self._keeper.end(end.ok, end.why, end.within_ns, cleaned_up)

    def _close(self, end: End) -> None:
        processes = self._world.processes
        if end.cause is not None:
            others = [exit for exit in self._enforcer.failures if exit != end.cause]
            first_rank = self._group.place.first_rank
            ends = [(exit.rank - first_rank, exit.code) for exit in (end.cause, *others)]
            self._world.show(processes.summary(ends))
        processes.close(keep_errors=end.cause is not None or end.exit_code == CODE_AT_FAULT)
        self._group.close()
        self._enforcer.close()
        self._server.close()
        self._done(end.exit_code)
