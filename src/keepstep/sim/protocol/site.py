"""Site: what keepstep runs on one machine: its keeper, and how processes of the machine find it.

`KeeperProcess` runs the real `runtime/keeper/keeper.py` on the ports of this simulation, and stands
in for `runtime/keeper/process.py`: it takes connections, calls `tick` at intervals, and ends when
that says so. One keeper lives at a time; whoever finds none starts one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keepstep.config import Settings
from keepstep.core.wire.conversations import KEEPER_WITH_NODE, RANK_WITH_KEEPER
from keepstep.errors import MemoryBudgetError
from keepstep.model.messages.keeper_rank import PageChanged
from keepstep.model.units import MS_NS
from keepstep.ports import Links, MessageCodec, Receiver
from keepstep.runtime.keeper.keeper import FromNode, Keeper
from keepstep.runtime.world import World as Surroundings
from keepstep.sim.protocol.agents import Agent
from keepstep.sim.protocol.links import SimLinks
from keepstep.sim.protocol.machine import UID, Line, Machine, SimExecutor, SimJournal, connect
from keepstep.sim.protocol.memory import SimMemory
from keepstep.sim.protocol.store import SimCheckpoints, SimWriter
from keepstep.sim.protocol.trainer import Rank
from keepstep.sim.protocol.world import Process

if TYPE_CHECKING:
    from keepstep.sim.protocol.job import Job

LOOK_AGAIN_NS = 20 * MS_NS
BUSY_TICK_NS = 50 * MS_NS  # the real one's is shorter: here it costs more than it tells


class KeeperProcess:
    """One life of the machine's keeper."""

    def __init__(self, site: Site) -> None:
        machine = site.machine
        self._site, self.process = site, machine.start("keeper")
        self.process.is_keeper = True
        self._random = site.job.world.stream(f"keeper {machine.number} {site.job.world.now_ns}")
        self._woken = self._poked = False
        self._journal = SimJournal(site.machine, "keeper", site.job.watch.journal)
        self.keeper: Keeper | None = None

    def boot(self) -> None:
        """As `main` does: ends at once when another one lives."""
        settings, memory = self._site.settings, SimMemory(self._site.machine.files, self.process)
        try:
            alone = memory.ensure(settings.job_dir / "keeper.lock", 1).lock(exclusive=True)
            if alone:
                self.keeper = Keeper(settings, self._surroundings(memory))
        except MemoryBudgetError as error:
            self.process.end(str(error))
            return
        if self.keeper is None:
            self.process.end("another keeper lives")
            return
        self._tick()

    def _surroundings(self, memory: SimMemory) -> Surroundings:
        site, process, machine, job = self._site, self.process, self._site.machine, self._site.job
        store = site.settings.store is not None

        def open_links(
            job_hash: bytes,
            incarnation: int,
            address: tuple[str, int],
            dead_ns: int,
            receiver: Receiver,
        ) -> Links:
            return SimLinks(job.network, process, job_hash, incarnation, address, dead_ns, receiver)

        return Surroundings(
            clock=machine.clock,
            memory=memory,
            journal=self._journal,
            workers=SimExecutor(process, job.plan.work_ns),
            open_links=open_links,
            wake=self._wake,
            checkpoints=SimCheckpoints(job.store, process) if store else None,
            writer=SimWriter(
                job.store, site.settings, process, lambda p: SimMemory(machine.files, p)
            )
            if store
            else None,
            pid=site.pid(process),
            uid=UID,
        )

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.process.after(self._site.job.plan.loop_ns, self._hear_peers)

    def _hear_peers(self) -> None:
        self._woken = False
        self._alive().hear_peers()

    def _alive(self) -> Keeper:
        assert self.keeper is not None
        return self.keeper

    def _tick(self) -> None:
        keeper = self._alive()
        if keeper.tick():
            keeper.close()
            self.process.end("all is over")
            return
        tick_ns = self._site.job.plan.tick_ns if keeper.tick_ns > BUSY_TICK_NS else BUSY_TICK_NS
        self.process.after(tick_ns // 2 + self._random.randrange(tick_ns // 2), self._tick)

    def accept(self, line: Line) -> None:
        line.hear = lambda message: self._hear(line, message)
        line.on_refused = self._alive().refuse
        line.gone = lambda: self._alive().gone(line)

    def _hear(self, line: Line, message: FromNode) -> None:
        if not isinstance(message, PageChanged):
            self._alive().hear(line, message)
        elif not self._poked:  # a keeper that is behind looks once at what several say
            self._poked = True
            self.process.after(
                max(MS_NS, 10 * self._site.job.plan.loop_ns), self._look, line, message
            )

    def _look(self, line: Line, message: PageChanged) -> None:
        self._poked = False
        self._alive().hear(line, message)


class Site:
    """`node`: which one it was last, for people."""

    def __init__(self, job: Job, machine: Machine, settings: Settings) -> None:
        self.job, self.machine, self.settings = job, machine, settings
        self.keeper: KeeperProcess | None = None
        self.agent: Agent | None = None
        self.ranks: dict[int, Rank] = {}
        self._starting_ns = 0
        self.last_attempt = -1  # the newest round that the machine's agents took part in
        self._pids: dict[Process, int] = {}
        self._random = job.world.stream(f"site {machine.number}")

    def pid(self, process: Process) -> int:
        return self._pids.setdefault(process, 1000 + len(self._pids))

    @property
    def keeper_lives(self) -> bool:
        return self.keeper is not None and self.keeper.process.alive

    def ensure_keeper(
        self,
        process: Process,
        found: Callable[[Line], None],
        codec: MessageCodec = RANK_WITH_KEEPER,
    ) -> None:
        """`found` is called, in the process, with a connection to the machine's keeper, which is
        started if none lives."""
        if self.keeper_lives:
            assert self.keeper is not None
            keeper = self.keeper
            here, there = connect(
                process,
                self.pid(process),
                keeper.process,
                self.pid(keeper.process),
                (codec, KEEPER_WITH_NODE),
                self.job.plan.checks,
            )
            keeper.accept(there)
            found(here)
            return
        now_ns = self.job.world.now_ns
        if self._starting_ns <= now_ns:
            start_ns = self.job.plan.start_ns // 2 + self._random.randrange(self.job.plan.start_ns)
            self._starting_ns = now_ns + self.job.takes_ns("keeper_start_ns", start_ns)
            self.job.world.at(self._starting_ns, None, self._start_keeper)
        process.after(LOOK_AGAIN_NS, self.ensure_keeper, process, found, codec)

    def _start_keeper(self) -> None:
        if self.machine.alive and not self.keeper_lives:
            self.keeper = keeper = KeeperProcess(self)
            self.job.world.carry_out(keeper.process, keeper.boot)

    # -- the agent

    def start_agent(self) -> None:
        """The first one, or another one in the place of one that died: that ends the ranks it
        finds."""
        if not self.machine.alive:
            return
        follows = self.agent is not None
        for rank in list(self.ranks.values()):
            if rank.process.alive:
                rank.process.end("killed by the agent that has taken over")
        self.ranks.clear()
        self.job.world.carry_out(
            Process(self.job.world, self.machine, f"steward@{self.machine.number}"),
            self._make_agent,
            follows,
        )

    def _make_agent(self, follows: bool) -> None:
        agent = Agent(self, follows)
        agent.process.on_end.append(lambda: self._agent_ended(agent))

    def _agent_ended(self, agent: Agent) -> None:
        if self.machine.alive and not agent.done:
            self.job.world.after(
                self.job.takes_ns("agent_start_ns", self.job.plan.start_ns), None, self.start_agent
            )

    def rank_ended(self, number: int, rank: Rank) -> None:
        if self.machine.alive and self.agent is not None and self.agent.process.alive:
            self.agent.process.after(
                self.job.takes_ns("notice_ns", MS_NS), self.agent.rank_ended, number, rank
            )

    # -- what ranks tell their agent

    def agent_hears_regrouped(self, rank: Rank) -> None:
        if self.agent is not None and self.agent.process.alive:
            self.agent.process.after(MS_NS, self.agent.regrouped, rank)

    def rank_is_done(self, rank: Rank) -> None:
        """It has done its last step, and needs nobody any more."""
        self.job.watch.done(rank)
