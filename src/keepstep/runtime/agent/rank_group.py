"""Rank group: the ranks of this node from one attempt to the next.

Comes in: that an attempt is formed, or that the ranks have to find together anew. Goes out:
processes started or killed, the process that stands by made a rank, and to the ranks that stay in
their process that a peer is lost and where all meet again. Whether they may stay, and whether there
is another attempt at all, `core/recovery/restarts.py` has decided.

Invariant: when an attempt begins every rank of the node is one process, started for it or staying
from the attempt before; and nothing is started before what is to be killed is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from keepstep.core.economics.swap_price import SwapCosts, SwapPrice
from keepstep.core.recovery.standby import can_become
from keepstep.edge.shm.status_page import read_status
from keepstep.model.events import DEBUG, INFO, WARNING
from keepstep.model.launch import REJOIN, Launch, RankAssignment, RankEnd
from keepstep.model.restarts import RegroupLate, RestartAll
from keepstep.model.units import S_NS, human_ns
from keepstep.ports import Timer
from keepstep.runtime.agent.enforcer import Enforcer
from keepstep.runtime.agent.evidence_board import EvidenceBoard
from keepstep.runtime.agent.rank_server import RankServer
from keepstep.runtime.agent.world import AgentOptions, AgentWorld

# Times what the program takes to begin: the least it has to regroup, where that is longer than the
# deadline.
REGROUP_STARTS = 3
# Importing torch takes a core for seconds: not while the ranks start or find together.
STANDBY_AFTER_NS = 3 * S_NS
NO_PLACE = RankAssignment(-1, 0, 1, 0, 0, "", 0)


@dataclass(slots=True)
class _Restart:
    """One attempt has ended, and the next is to begin. `kept`: ranks may stay in their process."""

    why: str
    began_ns: int
    killed_ns: int
    kept: bool


@dataclass(slots=True)
class _Renewal:
    """All ranks have been started anew: how long that took besides meeting, so far. `missing`:
    those that have not their state yet."""

    killing_ns: int
    formed_ns: int
    missing: int


@dataclass(slots=True)
class _Regroup:
    """Ranks that stayed and newcomers find together. `late` is when they must have."""

    within_ns: int
    late: Timer


class RankGroup:
    """One node's. `late` hears ranks that have not found together in time, or never will."""

    def __init__(
        self,
        world: AgentWorld,
        options: AgentOptions,
        launch: Launch,
        server: RankServer,
        enforcer: Enforcer,
        late: Callable[[RegroupLate], None],
    ) -> None:
        self._world = world
        self._options = options
        self._launch = launch
        self._server = server
        self._enforcer = enforcer
        self._late = late
        self.place = NO_PLACE  # in the newest attempt
        self._staying: set[int] = set()
        self._keeps = False  # ranks that can stay do, in this attempt
        self._is_ordered = True  # those that stayed have been told where to meet
        stands_by = bool(launch.standby) and can_become(launch.command, world.interpreter)
        self._wants_standby = stands_by and world.processes.may_stand_by
        self._standby_timer: Timer | None = None
        self._restart: _Restart | None = None
        self._regroup: _Regroup | None = None
        self._kill: _Kill | None = None
        self._processes: dict[int, int] = {}  # of this attempt, those that have ended too
        self._started_ns = 0  # when ranks were last started
        self._renewal: _Renewal | None = None
        self._costs = SwapCosts()

    # -- what is known

    @property
    def can_stay(self) -> bool:
        """Whether the node's ranks, those that have just ended among them, can stay in their
        process when a peer is lost."""
        return self._server.can_all_stay(self._pids)

    @property
    def some_can_stay(self) -> bool:
        """Whether there is a rank to which others could come back."""
        return any(map(self._server.can_stay, self._world.processes.living.values()))

    @property
    def swap_price(self) -> SwapPrice:
        """What it costs to have a spare take this node's place."""
        return self._costs.price

    @property
    def _pids(self) -> list[int]:
        return list(self._processes.values())

    @property
    def completed_step(self) -> int | None:
        """The newest step that any rank of this node has told of on its status page."""
        pages = [
            read_status(self._world.memory, self._options.job_dir, rank) for rank in self._mine
        ]
        return max((page.completed_step for page in pages if page), default=None)

    @property
    def _mine(self) -> range:
        return range(self.place.first_rank, self.place.first_rank + self._launch.ranks)

    # -- what happens meanwhile

    def by_themselves(self, ends: Sequence[RankEnd]) -> list[RankEnd]:
        """Which of these ended by themselves: the others were killed here."""
        killed = self._kill.waits_for if self._kill is not None else set()
        return [end for end in ends if end.rank not in killed]

    def ended(self, ranks: Collection[int]) -> None:
        """These have. With the last one that was to be killed the next attempt may begin, so
        whatever else is to be said of them comes first."""
        if self._kill is not None:
            self._kill.ended(ranks)

    def ended_well(self, ranks: Collection[int]) -> Iterator[RegroupLate]:
        """These have ended well. One that had done its last step when the others were told of a
        lost one is not among them again."""
        gone = tuple(rank for rank in ranks if rank not in self._server.regrouped)
        if gone and self._regroup is not None:
            self._end_regroup()
            yield RegroupLate(gone, 0, self._world.clock.monotonic_ns())

    def rank_cannot_stay(self, rank: int) -> None:
        """Nobody waits any more for one that was to find its peers again."""
        if self._regroup is not None and rank not in self._server.regrouped:
            self._end_regroup()
            self._late(RegroupLate((rank,), 0, self._world.clock.monotonic_ns()))

    def rank_has_state(self) -> None:
        """A rank that was started is through with its beginning."""
        now_ns = self._world.clock.monotonic_ns()
        self._costs.started(now_ns - self._started_ns)
        renewal = self._renewal
        if renewal is None:
            return
        renewal.missing -= 1
        if not renewal.missing:
            self._renewal = None
            self._costs.restarted(renewal.killing_ns + now_ns - renewal.formed_ns)

    def rank_regrouped(self) -> None:
        """One more rank trains on; perhaps the last one."""
        if len(self._server.regrouped) < self._launch.ranks or self._regroup is None:
            return
        self._end_regroup()
        self._standby_soon()
        restart, self._restart = self._restart, None
        if restart is not None:  # else this node is new here
            took_ns = self._world.clock.monotonic_ns() - restart.began_ns
            self._costs.regrouped(took_ns)
            why = f"all ranks of this node train on after {human_ns(took_ns)}"
            told = {"duration_ns": took_ns, "attempt": self.place.attempt}
            self._world.journal.record("recovered", why, WARNING, **told)

    def _end_regroup(self) -> None:
        regroup, self._regroup = self._regroup, None
        if regroup is not None:
            regroup.late.cancel()

    def _regroup_is_late(self) -> None:
        regroup, self._regroup = self._regroup, None
        if regroup is not None:
            late = tuple(rank for rank in self._mine if rank not in self._server.regrouped)
            if late:
                now_ns = self._world.clock.monotonic_ns()
                self._late(RegroupLate(late, regroup.within_ns, now_ns))

    def _standby_soon(self) -> None:
        if self._wants_standby and self._server.standby is None and self._standby_timer is None:
            self._standby_timer = self._world.timers.after(STANDBY_AFTER_NS, self._start_standby)

    def _start_standby(self) -> None:
        self._standby_timer = None
        self._world.processes.start_standby()

    # -- one attempt ends

    def end(self, action: RestartAll, then: Callable[[list[int]], None]) -> None:
        """All ranks are killed, to start anew; `then` hears those that do not die, once the others
        are gone."""
        began_ns = self._world.clock.monotonic_ns()
        self._end_regroup()
        told = INFO if action.least else WARNING  # that nodes are awaited says it already
        self._world.journal.record("anew", action.why, told)
        if action.refused and self.place.attempt >= 0:
            why = f"the ranks do not stay in their process: {action.refused}"
            self._world.journal.record("refused", why, DEBUG, rung="regroup", why=action.refused)

        def killed(undead: list[int]) -> None:
            if not undead:
                killed_ns = self._world.clock.monotonic_ns()
                self._restart = _Restart(self._why(action), began_ns, killed_ns, kept=False)
            then(undead)

        self.kill(set(self._world.processes.living), killed)

    def notify(self, action: RestartAll) -> None:
        """The ranks that live are told that a peer is lost: gloo tells only its neighbours."""
        began_ns = self._world.clock.monotonic_ns()
        self._server.peer_lost(list(self._world.processes.living.values()), action.fact)
        self._server.regrouped.clear()
        self._restart = _Restart(self._why(action), began_ns, began_ns, kept=True)
        self._world.journal.record("plan", action.why, WARNING, rung="regroup")

    def _why(self, action: RestartAll) -> str:
        """What began a way back is told with what came upon it before all trained on."""
        if self._restart is None or self._restart.why == action.why:
            return action.why
        first = self._restart.why.partition("; then ")[0]
        return f"{first}; then {action.why}"

    def kill(self, ranks: Collection[int], then: Callable[[list[int]], None]) -> None:
        """SIGKILL at once: what the ranks have to lose lies in memory that outlives them. `then`
        hears, by their number in the job, those that do not die."""
        processes = self._world.processes
        dying = set(ranks) & set(processes.living)
        for rank in dying:
            self._server.forget(processes.living[rank])
        self._enforcer.forget(dying)
        if self._kill is not None:
            self._kill.is_superseded()
        kill = _Kill(dying, lambda left: then([self.place.first_rank + rank for rank in left]))
        self._kill = kill
        if not dying:
            kill.is_over()
            return
        processes.kill(dying)
        kill.late = self._world.timers.after(self._options.deadlines.kill_ns, kill.is_over)

    # -- the next one begins

    def enter(self, place: RankAssignment, keep: bool, then: Callable[[list[int]], None]) -> None:
        """The attempt is formed: whoever cannot stay in its process ends. `then` hears those that
        do not die; if there are none, `fill` is to follow."""
        before, self.place = self.place, place
        self._renewal = None
        self._keeps = keep
        self._is_ordered = False
        if not keep:
            self._nobody_stays()
        living = self._world.processes.living
        stays = keep and before.first_rank == place.first_rank
        self._staying = {r for r, pid in living.items() if stays and self._server.can_stay(pid)}
        self._enforcer.prepare()
        self.kill(set(living) - self._staying, then)

    def _nobody_stays(self) -> None:
        """Who was to find its peers again has died meanwhile, with all others: nobody is waited
        for, and what began as a regroup is a restart of all."""
        self._end_regroup()
        if self._restart is not None:
            self._restart = replace(self._restart, kept=False)

    def order_regroup(self) -> None:
        """The keeper knows the nodes: those that stay may meet there."""
        if not self._is_ordered:
            self._is_ordered = True
            living = self._world.processes.living
            staying = [living[rank] for rank in sorted(self._staying & set(living))]
            self._server.regroup(staying, self.place)

    def fill(self, board: EvidenceBoard | None, formed_ns: int) -> int:
        """Start what is missing; when that was done."""
        world, place = self._world, self.place
        self._staying &= set(world.processes.living)  # who was to stay may have died meanwhile
        missing = set(range(self._launch.ranks)) - self._staying
        world.take_part(place.attempt)
        pids = self._start(missing, {REJOIN: "1"} if self._keeps else {})
        started_ns = self._started_ns = world.clock.monotonic_ns()
        self._processes = dict(world.processes.living)
        everyone = {place.first_rank + rank: pid for rank, pid in self._processes.items()}
        self._enforcer.begin(place, everyone, board)
        if self._keeps:
            self._server.joining(pids)
            self._begin_regroup()
        else:
            self._standby_soon()
        self._tell_restarted(pids, formed_ns)
        return started_ns

    def _begin_regroup(self) -> None:
        self._end_regroup()
        within_ns = max(
            self._options.deadlines.regroup_ns, REGROUP_STARTS * self._costs.longest_start_ns
        )
        late = self._world.timers.after(within_ns, self._regroup_is_late)
        self._regroup = _Regroup(within_ns, late)

    def _start(self, missing: set[int], environ: dict[str, str]) -> list[int]:
        """The process that stands by is the first one."""
        processes, place = self._world.processes, self.place
        pids: list[int] = []
        started: set[int] = set()
        for rank in sorted(missing)[:1] if place.attempt > 0 else ():
            whole = {**processes.environ_of(rank, place), **environ}
            if self._server.become(self._launch.command, whole) is not None:
                pid = processes.standby_becomes(rank)
                number = place.first_rank + rank
                why = f"process {pid}, which stood by, is rank {number} now"
                self._world.journal.record("rank-respawned", why, rank=number, pid=pid)
                pids.append(pid)
                started.add(rank)
        return [*pids, *processes.start(place, missing - started, environ).values()]

    def _tell_restarted(self, pids: list[int], formed_ns: int) -> None:
        restart = self._restart
        if restart is None:
            return
        if not restart.kept:
            self._restart = None  # else until all have found together
            killing_ns = restart.killed_ns - restart.began_ns
            self._renewal = _Renewal(killing_ns, formed_ns, self._launch.ranks)
        took = human_ns(self._started_ns - restart.began_ns)
        who = "all" if not self._staying else f"{len(pids)} of {self._launch.ranks} ranks"
        self._world.journal.record(
            "ranks-restarted",
            f"{restart.why}; {who} started again after {took}",
            attempt=self.place.attempt,
            pids=pids,
            kept=len(self._staying),
            kill_ns=restart.killed_ns - restart.began_ns,
            meet_ns=formed_ns - restart.killed_ns,
            start_ns=self._started_ns - formed_ns,
        )

    def close(self) -> None:
        self._end_regroup()
        if self._standby_timer is not None:
            self._standby_timer.cancel()


class _Kill:
    """Processes that are to end. `then` hears which have not when it is over."""

    def __init__(self, waits_for: set[int], then: Callable[[list[int]], None]) -> None:
        self.waits_for = set(waits_for)
        self.late: Timer | None = None
        self._then: Callable[[list[int]], None] | None = then

    def ended(self, ranks: Collection[int]) -> None:
        mine = self.waits_for & set(ranks)
        self.waits_for -= mine
        if mine and not self.waits_for:
            self.is_over()

    def is_superseded(self) -> None:
        """Another one is under way, which takes the ranks of this one, too."""
        self._then = None

    def is_over(self) -> None:
        if self.late is not None:
            self.late.cancel()
        then, self._then = self._then, None
        if then is not None:
            then(sorted(self.waits_for))
