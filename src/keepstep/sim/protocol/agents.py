"""Agents: who starts keepers and ranks, one on each machine, and has all find together again.

Comes in: ranks' ends, words of the keeper, what other agents wrote where they meet. Goes out:
rounds, verdicts, the mesh, starts, kills, notices and orders to regroup. What follows from a
failure is decided by `core/recovery/restarts.py`, who is which node by
`core/recovery/rendezvous.py`, as in `runtime/agent/agent.py` and `agent_meeting.py`.

Not run here: those two modules themselves, the processes' supervision (pidfds, standby, steward: a
killed agent is followed by another one after a while, which ends the ranks it finds), hang
detection (`core/detection/progress.py`), the places where collectives meet, roll forward. One
action at a time is carried out at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from keepstep.core.recovery.rendezvous import assign, keepers_round, members_of, sat_there
from keepstep.core.recovery.restart_budget import Patience
from keepstep.core.recovery.restarts import Restarts
from keepstep.core.wire.conversations import AGENT_WITH_KEEPER
from keepstep.model.failure import Budget
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_agent import (
    AgentHere,
    JobEnded,
    MemoryKept,
    MeshKnown,
    PeerDead,
    ToAgent,
)
from keepstep.model.messages.keeper_rank import BeginMesh, CannotListen, Listen, Listening
from keepstep.model.restarts import (
    Action,
    AllEndedWell,
    AwaitOthers,
    End,
    Event,
    Exit,
    RanksExited,
    RanksStarted,
    RegroupLate,
    RestartAll,
    RoundWanted,
    Stopped,
)
from keepstep.model.rounds import Arrival, Verdict, arrival_from_text, verdict_from_text
from keepstep.model.units import MS_NS, S_NS
from keepstep.sim.protocol.machine import Line
from keepstep.sim.protocol.meeting import CALLED_OFF

if TYPE_CHECKING:
    from keepstep.sim.protocol.site import Site
    from keepstep.sim.protocol.trainer import Rank

MAX_RESTARTS = 10_000
REGROUP_NS = 60 * S_NS
SECRET = "simulated simulated secret"
SIGKILL = 9


class Agent:
    """One life of a machine's agent. `follows`: another one was here and died; its ranks have been
    ended."""

    def __init__(self, site: Site, follows: bool = False) -> None:
        self.site, self.job, self._follows = site, site.job, follows
        site.agent = self
        self.process = site.machine.start("agent")
        self.token = f"agent {site.machine.number}.{self.job.next_token()}"
        self.restarts = Restarts(
            self.job.plan.ranks_per_node,
            MAX_RESTARTS,
            site.settings.store is not None,
            Patience(Budget({}, 1)),
        )
        self._line: Line | None = None
        self._listens: Listening | None = None
        self._mesh: Mesh | None = None
        self._mesh_known: Callable[[], None] | None = None
        self._number = 0
        self._place = -1
        self._node: int | None = None
        self._newest_round = -1
        self._keep = False
        self._formed = -1  # the newest round that was formed with this agent
        self._meeting = False
        self._regrouping: set[int] | None = None
        self._regroup_attempt = -1
        self.done = False
        self._has_said, self._leaving = True, ""
        self._find_keeper()
        self.job.watch.agent_came(self)

    @property
    def is_alive(self) -> bool:
        return self.process.alive

    @property
    def node(self) -> int | None:
        return self._node

    # -- the keeper

    def _find_keeper(self) -> None:
        self.site.ensure_keeper(self.process, self._greet, AGENT_WITH_KEEPER)

    def _greet(self, line: Line) -> None:
        self._line = line
        line.hear, line.gone = self._hear, self._keeper_gone
        line.send(AgentHere(self.site.pid(self.process)))
        port = self._listens.port if self._listens is not None else 0
        line.send(Listen(self.site.machine.host, port))

    def _keeper_gone(self) -> None:
        self._line = None
        if not self.done:
            self._find_keeper()

    def _hear(self, message: ToAgent) -> None:
        match message:
            case Listening():
                first, self._listens = self._listens is None, message
                if self._mesh is not None:
                    self._tell_mesh()
                if first:
                    self._next_open_round()
            case CannotListen():
                assert self._line is not None
                self._line.send(Listen(self.site.machine.host, 0))
            case MeshKnown() if self._mesh_known is not None:
                then, self._mesh_known = self._mesh_known, None
                then()
            case PeerDead(version, node, why) if (
                self._mesh is not None and version == self._mesh.version
            ):
                told = f"node {node} does not answer: {why}"
                self._happened(RoundWanted(told, self._now_ns(), able=self._able()))

    def _tell_mesh(self) -> None:
        assert self._mesh is not None and self._listens is not None
        mesh = self._mesh
        there = replace(
            mesh.members[mesh.node],
            port=self._listens.port,
            incarnation=self._listens.incarnation,
        )
        members = (*mesh.members[: mesh.node], there, *mesh.members[mesh.node + 1 :])
        if self._line is not None:
            self._line.send(BeginMesh(replace(mesh, members=members)))

    # -- rounds

    def _next_open_round(self, number: int = 0) -> None:
        """The first without a verdict, whatever became of those before."""

        def found(texts: list[str | None]) -> None:
            if texts[0] is None:
                self._number = number
                if self._follows:
                    self._look_for_predecessor()
                else:
                    self._arrive()
                return
            verdict = verdict_from_text(texts[0])
            if verdict.kind != "again":
                self._happened(AllEndedWell(verdict.why, self._now_ns()))
                return
            self._keep = verdict.keep
            self._next_open_round(number + 1)

        self.job.kv.read(self.process, [f"{number}/verdict"], found)

    def _look_for_predecessor(self) -> None:
        """It may have been killed in this round, or between its arrival and the start of its
        ranks."""
        number = self._number

        def found(texts: list[str | None]) -> None:
            assert self._listens is not None
            listens = self._listens
            arrivals = [arrival_from_text(text) for text in texts if text]
            seated = sat_there(arrivals, listens.host, listens.port, listens.incarnation)
            if number != self.site.last_attempt and not seated:
                self._arrive()
                return
            why = "the agent of a node was killed, and another one has taken over"
            self._say(
                number, Verdict("again", why, keep=True), lambda: self._next_open_round(number)
            )

        self.job.kv.read(
            self.process, [f"{number}/seat/{place}" for place in range(self.job.plan.nodes)], found
        )

    def _arrive(self) -> None:
        """Take part in the next round: this node's ranks wait for it, or are dead."""
        self._meeting = True
        assert self._listens is not None
        heard = self._listens
        self._newest_round = max(self._newest_round, heard.mesh_version)
        plan = self.job.plan
        self._arrival = Arrival(
            *(
                self.token,
                heard.host,
                heard.port,
                heard.incarnation,
                plan.ranks_per_node,
                plan.nodes,
            ),
            rack=self.site.machine.rack,
            node=self._node,
            newest_round=self._newest_round,
        )
        self._watch_verdict(self._number)
        self._take_seat(0)

    def _take_seat(self, place: int) -> None:
        number, nodes = self._number, self.job.plan.nodes
        if place == nodes:  # full: another round, when one is missing
            self._place, self._node = -1, None
            self.job.kv.swap(self.process, f"{number}/full/0", "yes", _nothing)
            return

        def taken(text: str) -> None:
            if number != self._number:
                return
            if arrival_from_text(text) != self._arrival:
                self._take_seat(place + 1)
                return
            self._place = place
            if place == nodes - 1:
                self.job.kv.swap(self.process, f"{number}/full/0", "yes", _nothing)
            self.job.kv.wait(self.process, [f"{number}/full/0"], lambda _: self._full(number))

        self.job.kv.swap(self.process, f"{number}/seat/{place}", self._arrival.to_text(), taken)

    def _full(self, number: int) -> None:
        nodes = self.job.plan.nodes
        if number != self._number:
            return

        def seated(texts: list[str | None]) -> None:
            arrivals = [arrival_from_text(t) for t in texts[1:] if t]
            if texts[0] is not None or len(arrivals) < nodes or number != self._number:
                return
            self._node = assign(arrivals)[self._place]
            self.job.kv.swap(self.process, f"{number}/ready/{self._place}", "yes", _nothing)
            ready = [f"{number}/ready/{place}" for place in range(nodes)]
            self.job.kv.wait(
                self.process, ready, lambda marks: self._ready(number, arrivals, marks)
            )

        keys = [f"{number}/verdict", *(f"{number}/seat/{place}" for place in range(nodes))]
        self.job.kv.read(self.process, keys, seated)

    def _ready(self, number: int, arrivals: list[Arrival], marks: list[str]) -> None:
        if number != self._number or CALLED_OFF in marks:
            return
        assert self._node is not None
        round_ = keepers_round(number, self.job.first_round, arrivals)
        self._mesh = Mesh(round_, self._node, members_of(arrivals), SECRET)
        self._newest_round = round_
        self._formed = self.site.last_attempt = number
        self._meeting = False
        self.job.watch.formed(self, number, self._mesh)
        self._start_ranks()

    def _watch_verdict(self, number: int) -> None:
        def found(texts: list[str]) -> None:
            if number != self._number:
                return
            verdict = verdict_from_text(texts[0])
            if verdict.kind == "done":
                self._happened(AllEndedWell(verdict.why, self._now_ns()))
                return
            if verdict.kind == "stop":
                self._happened(Stopped(verdict.why, verdict.code, verdict.signum))
                return
            self._keep = verdict.keep
            self._number = number + 1
            if self._formed == number:
                wanted = RoundWanted(
                    verdict.why,
                    self._now_ns(),
                    able=verdict.keep,
                    decided=True,
                    completed_step=self._completed(),
                )
                self._happened(wanted)
                if not self._meeting:
                    self._arrive()
            else:
                self._arrive()

        self.job.kv.wait(self.process, [f"{number}/verdict"], found)

    def _say(self, number: int, verdict: Verdict, then: Callable[[], None]) -> None:
        self.job.kv.swap(self.process, f"{number}/verdict", verdict.to_text(), lambda _: then())

    # -- ranks

    def _start_ranks(self) -> None:
        assert self._mesh is not None
        mine = self._mesh.ranks_of(self._mesh.node)
        stayed = {
            r: rank
            for r, rank in self.site.ranks.items()
            if rank.process.alive and r in mine and self._keep
        }
        for number, rank in list(self.site.ranks.items()):
            if number not in stayed:
                self.kill(rank, "its place is another's")
                self.site.ranks.pop(number, None)
        gang = self.job.gang(self._formed)
        self.restarts.handle(RanksStarted(self._now_ns(), mine.start))
        newcomers = self._keep

        def regroup() -> None:
            self._regrouping, self._regroup_attempt = set(mine), gang.attempt
            self.process.after(REGROUP_NS, self._regroup_late, gang.attempt)
            for rank in stayed.values():
                rank.process.after(MS_NS, rank.regroup, gang)

        self._tell_mesh()
        if newcomers:
            self._mesh_known = regroup
        for number in mine:
            if number not in stayed:
                delay_ns = self.job.plan.start_ns // 2 + self.job.chance.randrange(
                    self.job.plan.start_ns
                )
                rank = self.site.ranks[number] = self.job.new_rank(
                    self.site, number, gang, newcomers, delay_ns
                )
                rank.process.on_end.append(
                    lambda rank=rank, at=number: self.site.rank_ended(at, rank)  # type: ignore[misc]
                )

    def regrouped(self, rank: Rank) -> None:
        if self._regrouping is not None and rank.site.ranks.get(rank.rank) is rank:
            self._regrouping.discard(rank.rank)
            if not self._regrouping:
                self._regrouping = None

    def _regroup_late(self, attempt: int) -> None:
        if (
            self._regrouping
            and attempt == self._regroup_attempt == self._formed
            and not self._meeting
        ):
            late, self._regrouping = tuple(sorted(self._regrouping)), None
            self._happened(RegroupLate(late, REGROUP_NS, self._now_ns()))

    def rank_ended(self, number: int, rank: Rank) -> None:
        """The kernel tells it."""
        if self.site.ranks.get(number) is not rank:
            return
        code = -SIGKILL if rank.exit_code is None else rank.exit_code
        is_done = code == 0 and self._regrouping is not None and number in self._regrouping
        exits = (Exit(number, code, rank.process.why_ended[:80]),)
        self._happened(RanksExited(exits, self._now_ns(), self._completed(), self._able()))
        if is_done:  # it had done its last step when the others were told of a lost one
            self._regrouping = None
            self._happened(RegroupLate((number,), 0, self._now_ns()))

    def _able(self) -> bool:
        ranks = list(self.site.ranks.values())
        return bool(ranks) and all(r.able for r in ranks)

    def _completed(self) -> int | None:
        steps = [r.step for r in self.site.ranks.values() if r.step >= 0]
        return max(steps, default=None)

    def kill(self, rank: Rank, why: str) -> None:
        self.job.watch.killed(self, rank, why)
        rank.process.end(f"killed by its agent: {why}")

    # -- what follows

    def _now_ns(self) -> int:
        return self.site.machine.clock.monotonic_ns()

    def _happened(self, event: Event) -> None:
        action = self.restarts.handle(event)
        if action is not None:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, (RestartAll, AwaitOthers, End)):
            self.job.world.note(self.process.name, f"{type(action).__name__}: {action.why}")
        if isinstance(action, RestartAll):
            self._restart(action)
        elif isinstance(action, AwaitOthers):
            self._ended_well()
        elif isinstance(action, End):
            self._end(action.ok, action.why)

    def _restart(self, action: RestartAll) -> None:
        attempt = self._formed
        self._regrouping = self._mesh_known = None
        for rank in list(self.site.ranks.values()):
            if not rank.process.alive:
                continue
            if action.keep and rank.able:
                rank.process.after(MS_NS, rank.hear_lost)
            else:
                self.kill(rank, action.why)
        self._say(attempt, Verdict("again", action.fact, keep=action.keep), _nothing_at_all)

    def _ended_well(self) -> None:
        number, place, nodes = self._formed, self._place, self.job.plan.nodes

        def marked(_: str) -> None:
            self.job.kv.read(self.process, [f"{number}/well/{p}" for p in range(nodes)], counted)

        def counted(marks: list[str | None]) -> None:
            if None not in marks:
                self._say(
                    number,
                    Verdict("done", f"the ranks of all {nodes} nodes ended well"),
                    _nothing_at_all,
                )

        self.job.kv.swap(self.process, f"{number}/well/{place}", "yes", marked)

    def _end(self, ok: bool, why: str) -> None:
        self.done = True
        for rank in list(self.site.ranks.values()):
            if rank.process.alive:
                self.kill(rank, why)
        self.job.watch.agent_ends(self, ok, why)
        if not ok:
            self._has_said = False
            self._say_stop(self._number, why)
        if self._line is not None:
            self._last_word(self._line, ok, why)
        else:
            self._clean_up(ok, why)

    def _say_stop(self, number: int, why: str) -> None:
        """About the first round that has no verdict: the others may be on their way to the next."""

        def said(text: str) -> None:
            if verdict_from_text(text).kind == "again":
                self._say_stop(number + 1, why)
                return
            self._has_said = True
            if self._leaving:
                self._leave(self._leaving)

        self.job.kv.swap(
            self.process, f"{number}/verdict", Verdict("stop", why, code=1).to_text(), said
        )

    def _last_word(self, line: Line, ok: bool, why: str) -> None:
        def hear(message: ToAgent) -> None:
            if isinstance(message, MemoryKept):
                self._leave("the job is over, and its memory is kept for a while")

        line.hear, line.gone = hear, lambda: self._clean_up(ok, why)
        line.send(AgentHere(self.site.pid(self.process)))
        line.send(JobEnded(ok, why))

    def _clean_up(self, ok: bool, why: str) -> None:
        """The keeper is gone: if it has left something, another one has to remove it."""
        if self.site.machine.files.names(str(self.site.settings.job_dir)):
            self.site.ensure_keeper(
                self.process, lambda line: self._last_word(line, ok, why), AGENT_WITH_KEEPER
            )
        else:
            self._leave("the job is over")

    def _leave(self, why: str) -> None:
        """Once the others know."""
        self._leaving = why
        if self._has_said:
            self.process.end(why)


def _nothing(text: str) -> None:
    """Whatever is there."""


def _nothing_at_all() -> None:
    """Whatever became of it."""
