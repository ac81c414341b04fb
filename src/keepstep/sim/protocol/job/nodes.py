"""Nodes: what runs of keepstep on one machine: the keeper, the agent and its ranks, each the
product's own object over simulated ports.

`KeeperLife`, `AgentLife` and `SimNode.new_program` stand in for the process mains of `runtime/`:
they put a world together, and hand on what happens. Whether a dead agent is followed by another one
says `core/recovery/supervision.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from keepstep.core.recovery.supervision import MAX_SHORT_LIVES, Supervision, predecessor
from keepstep.core.wire.conversations import (
    AGENT_WITH_KEEPER,
    AGENT_WITH_PROCESS,
    KEEPER_WITH_NODE,
    PROCESS_WITH_AGENT,
    RANK_WITH_KEEPER,
)
from keepstep.core.wire.streams import StreamLimits
from keepstep.errors import KeeperError, KeepstepError, StoreError
from keepstep.model.events import Event
from keepstep.model.launch import Predecessor
from keepstep.model.messages.agent_rank import RegroupAt
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Box, BoxServer, Hearer, Links, MessageCodec, Receiver, Region
from keepstep.runtime.agent.agent import SOCKET, Agent
from keepstep.runtime.agent.world import AgentOptions, AgentWorld
from keepstep.runtime.keeper.run import LOCK, KeeperRun
from keepstep.runtime.keeper.run import SOCKET as KEEPER_SOCKET
from keepstep.runtime.keeper_search import KeeperSearches
from keepstep.runtime.keeper_world import KeeperWorld as KeeperWorld
from keepstep.runtime.rank.bootstrap import NodeFacts
from keepstep.runtime.rank.identity import place_in_world, place_of_newcomer
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld
from keepstep.runtime.refused_messages import RefusedMessages
from keepstep.runtime.replication.pacing import Pacing
from keepstep.sim.protocol.job.checkpoint_format import read_state
from keepstep.sim.protocol.job.collectives import INTERFACE, SimGroups
from keepstep.sim.protocol.job.live_state import SimState
from keepstep.sim.protocol.job.meetings import SimMeetingPlaces
from keepstep.sim.protocol.job.overheard import Overheard
from keepstep.sim.protocol.job.persisters import SimPersisters, open_store
from keepstep.sim.protocol.job.processes import SimProbes, SimRankProcesses, Standby
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.job.surroundings import Surroundings
from keepstep.sim.protocol.wire.links import SimLinks
from keepstep.sim.protocol.world.boxes import LocalSockets, SimBox
from keepstep.sim.protocol.world.executor import SerialExecutor, SimExecutor, TrainerExecutor
from keepstep.sim.protocol.world.machine import UID, Machine, SimJournal
from keepstep.sim.protocol.world.memory import SimMemory
from keepstep.sim.protocol.world.timers import SimTimers
from keepstep.sim.protocol.world.world import Process

SIGKILL = 9

LAUNCH = "the only one"  # nobody starts the job anew


class SimNode:
    """One machine's. `keeper` and `agent`: the newest lives; `exit_code`: of the job here, once
    nobody follows the last agent."""

    def __init__(self, around: Surroundings, machine: Machine) -> None:
        self.around = around
        self.machine = machine
        self.job_dir = around.settings.job_dir
        self.sockets = LocalSockets(machine, around.plan.checks, around.plan.lost_pokes)
        self.keeper: KeeperLife | None = None
        self.agent: AgentLife | None = None
        self.exit_code: int | None = None
        self.random: Random = around.world.stream(f"node {machine.number}")
        self._supervision = Supervision()
        Overheard(self.sockets, machine, around.programs, around.observers)

    # -- the keeper

    def keepers(self, process: Process, codec: MessageCodec, journal: SimJournal) -> KeeperSearches:
        """How a process here finds it."""
        door = SimKeeperDoor(self, process, codec, journal)
        return KeeperSearches(door, self.machine.clock, SimTimers(process))

    def start_keeper(self) -> None:
        """As the command `keepstep keeper` would."""
        delay_ns = self.around.plan.takes_ns("keeper_start_ns", self.random)
        process = self.machine.start("keeper")
        process.after(delay_ns, self._keeper_starts, process)

    def _keeper_starts(self, process: Process) -> None:
        """One that finds another alive ends by itself; `keeper` is the one that lives."""
        life = KeeperLife(self, process)
        if self.keeper is None or not self.keeper.process.alive:
            self.keeper = life
        life.run.begin()

    # -- the agent

    def start_agent(self) -> None:
        """The first one, or another one in the place of one that was killed."""
        if self.machine.alive:
            self.agent = life = AgentLife(self, self._predecessor())
            life.process.on_end.append(lambda: self._agent_ended(life))
            self.around.observers.agent_came(self.machine)
            self.around.world.carry_out(life.process, life.begin)

    def _predecessor(self) -> Predecessor | None:
        before = self.agent
        if before is None:
            return None
        return predecessor(before.follows, before.process.pid, before.attempt, before.signalled)

    def _agent_ended(self, life: AgentLife) -> None:
        if not self.machine.alive:
            return
        lived_ns = self.around.world.now_ns - life.began_ns
        code = -SIGKILL if life.exit_code is None else life.exit_code
        signum = life.signalled
        attempt = predecessor(life.follows, life.process.pid, life.attempt, signum).attempt
        exit_code = self._supervision.exit_code(code, life.last_word, signum, lived_ns, attempt)
        plan = self.around.plan
        if exit_code is None:
            delay_ns = plan.takes_ns("agent_start_ns", self.random)
            self.around.world.after(delay_ns, None, self.start_agent)
        elif self._supervision.short_lives >= MAX_SHORT_LIVES and signum is None:
            self._supervisor_gives_up(life)
        else:
            if self._supervision.short_lives >= MAX_SHORT_LIVES:
                self._end_ranks(life)
            self.exit_code = exit_code
            self.around.observers.agent_ended(self.machine, exit_code)

    def _supervisor_gives_up(self, life: AgentLife) -> None:
        """It ends the ranks; whoever has started it starts it again."""
        self._end_ranks(life)
        self._supervision = Supervision()
        self.agent = None
        delay_ns = self.around.plan.takes_ns("replace_ns", self.random)
        self.around.world.after(delay_ns, None, self.start_agent)

    def _end_ranks(self, life: AgentLife) -> None:
        for process in list(self.machine.processes.values()):
            if process.parent_pid == life.process.pid:
                process.end("its agent was killed too often")

    # -- ranks

    def new_program(self, process: Process, environ: Mapping[str, str]) -> Program:
        """A rank's, as its environment has it; not begun yet."""
        around, machine, plan = self.around, self.machine, self.around.plan
        (rank, world_size), here = place_in_world(environ), int(environ["LOCAL_WORLD_SIZE"])
        newcomer_at = place_of_newcomer(environ)
        local_rank = int(environ["LOCAL_RANK"])
        who = RankIdentity(around.settings.job, UID, rank, world_size, here, local_rank)
        memory = SimMemory(machine.files, process)
        journal = SimJournal(machine, f"rank {rank}", around.observers.recorded)
        live = self._new_state(process, rank, world_size)
        groups = SimGroups(
            process=process,
            memory=memory,
            clock=machine.clock,
            rank=rank,
            world_size=world_size,
            can_be_rebuilt=plan.stays,
            is_muted=newcomer_at is not None,
            place_at=around.meetings.at,
            place=around.meetings.at(_place_of(environ)),
        )
        tempo = plan.new_tempo(rank, around.world.stream(f"tempo {rank}"))
        is_split = not plan.wires.light
        act_ns = plan.act_ns_of(rank, world_size)
        trainer = TrainerExecutor(process, act_ns, is_split, tempo.trainer_act_ns)
        beside = partial(SerialExecutor, process, act_ns, is_split, tempo.background_act_ns)
        world = RankWorld(
            clock=machine.clock,
            timers=SimTimers(process),
            memory=memory,
            journal=journal,
            keepers=self.keepers(process, RANK_WITH_KEEPER, journal),
            agents=SimAgents(self, process, "KEEPSTEP_AGENT" in environ, journal),
            live=live,
            groups=groups,
            trainer=trainer,
            background=beside(),
            aside=beside(),
            available_bytes=lambda: memory.free_bytes(self.job_dir),
            pid=process.pid,
            has_agent="KEEPSTEP_AGENT" in environ,
            takes_place_at=newcomer_at,
        )
        program = Program(
            process=process,
            world=world,
            options=RankOptions.of(around.settings, launch=LAUNCH),
            who=who,
            node=self._facts(environ["MASTER_ADDR"]),
            live=live,
            groups=groups,
            trainer=trainer,
            oracle=around.oracle,
            script=plan.script,
            tempo=tempo,
            observer=around.observers,
        )
        around.programs[process] = program
        process.on_end.append(lambda: self._program_ended(process))
        return program

    def _new_state(self, process: Process, rank: int, world_size: int) -> SimState:
        oracle, read = self.around.oracle, partial(self._read_checkpoint, process, rank)
        return SimState(oracle.nbytes(rank), read, oracle.alike(rank, world_size))

    def _program_ended(self, process: Process) -> None:
        del self.around.programs[process]

    def _facts(self, meeting_host: str) -> NodeFacts:
        machine = self.machine
        return NodeFacts(
            host=machine.host,
            rack=machine.rack,
            secret=self.around.settings.secret,
            encrypt=self.around.settings.encrypt,
            meeting_host=meeting_host,
            has_process_group=True,
            address_towards=lambda host: machine.host,
            fresh_secret=f"{self.random.getrandbits(128):032x}",
        )

    def _read_checkpoint(self, process: Process, rank: int, step: int) -> bytes:
        settings = self.around.settings
        if settings.store is None:
            raise StoreError("a checkpoint was offered, and this rank knows of no store")
        disk = self.around.disk
        store = open_store(settings.store, disk, process, settings.job, settings.adopt).as_taken()
        return read_state(store, step, rank, self.around.oracle.nbytes(rank))

    def connect_standby(self, process: Process, standby: Standby) -> Box | None:
        """To the agent, if there is one."""
        return self.connect(process, SOCKET, PROCESS_WITH_AGENT, standby, _untold)

    def connect(
        self,
        process: Process,
        name: str,
        codec: MessageCodec,
        hearer: Hearer,
        tell: Callable[..., object],
    ) -> SimBox | None:
        try:
            return self.sockets.connect(process, self.job_dir / name, codec, hearer, tell)
        except OSError:
            return None


class SimKeeperDoor:
    """See `ports.KeeperDoor`."""

    def __init__(
        self, node: SimNode, process: Process, codec: MessageCodec, journal: SimJournal
    ) -> None:
        self._node = node
        self._process = process
        self._codec = codec
        self._journal = journal

    def connect(self, hearer: Hearer) -> Box | None:
        tell = self._journal.record
        return self._node.connect(self._process, KEEPER_SOCKET, self._codec, hearer, tell)

    def start(self, then: Callable[[KeepstepError | None], None]) -> None:
        if self._process.touch("start keeper"):
            self._process.after(MS_NS, then, KeeperError("no keeper can be started: no memory"))
            return
        self._node.start_keeper()
        self._process.after(MS_NS, then, None)

    def end(self, box: Box) -> None:
        keeper = self._node.keeper
        is_failing = self._process.touch("end keeper")
        if not is_failing and keeper is not None and keeper.process.pid == box.pid:
            keeper.process.end("killed: it did not answer")

    def in_vain(self, within_ns: int) -> KeeperError:
        return KeeperError(f"no keeper answered within {within_ns // S_NS} s")


class SimAgents:
    """See `ports.Agents`."""

    def __init__(
        self, node: SimNode, process: Process, has_agent: bool, journal: SimJournal
    ) -> None:
        self._node = node
        self._process = process
        self._has_agent = has_agent
        self._journal = journal

    def find(self, hearer: Hearer) -> Box | None:
        if not self._has_agent:
            return None
        tell = self._journal.record
        return self._node.connect(self._process, SOCKET, PROCESS_WITH_AGENT, hearer, tell)


class PageLock:
    """See `KeeperLock`. A process that cannot even have this page ends."""

    def __init__(self, memory: SimMemory, path: Path) -> None:
        self._memory, self._path = memory, path
        self._page: Region | None = None

    def take(self) -> bool:
        """See `KeeperLock`."""
        self._page = self._memory.ensure(self._path, 1)
        return self._page.lock(exclusive=True)

    def is_of_directory(self) -> bool:
        """See `KeeperLock`."""
        return self._page is not None and self._page.is_there()


class KeeperLife:
    """One life of the machine's keeper."""

    def __init__(self, node: SimNode, process: Process) -> None:
        self._node = node
        self.process = process
        self._journal = SimJournal(node.machine, "keeper", node.around.observers.recorded)
        self._memory = SimMemory(node.machine.files, process)
        self._is_woken = False
        self.run = KeeperRun(
            node.around.settings,
            self._world(),
            PageLock(self._memory, node.job_dir / LOCK),
            self._over,
            node.around.plan.turn_ns,
            node.around.plan.tick_ns,
        )

    def _over(self) -> None:
        self.run.close()
        self.process.end("all is over, or another keeper lives")

    def _world(self) -> KeeperWorld:
        around = self._node.around
        settings = around.settings
        url = settings.store
        workers = SimExecutor(self.process, around.plan.work_ns)
        return KeeperWorld(
            clock=self._node.machine.clock,
            timers=SimTimers(self.process),
            memory=self._memory,
            journal=self._journal,
            workers=workers,
            aside=workers,
            serve_boxes=self._serve,
            open_links=self._open_links,
            wake=self._wake,
            checkpoints=None
            if url is None
            else open_store(url, around.disk, self.process, settings.job, settings.adopt),
            persisters=None if url is None else self._persisters(),
            pid=self.process.pid,
            uid=UID,
        )

    def _persisters(self) -> SimPersisters:
        node = self._node
        plan = node.around.plan
        return SimPersisters(
            sockets=node.sockets,
            keeper=self.process,
            settings=node.around.settings,
            disk=node.around.disk,
            start_ns=lambda: plan.takes_ns("persister_start_ns", node.random),
            act_ns=plan.store_act_ns,
            tell=self._journal.record,
        )

    def _serve(self, path: Path, hearer: Hearer) -> BoxServer:
        listen = self._node.sockets.listen
        return listen(self.process, path, KEEPER_WITH_NODE, lambda box: hearer, self._tell)

    def _tell(self, kind: str, why: str) -> None:
        if kind == "message-refused":
            self.run.refuse("a process of this node", why)
        else:
            self._journal.record(kind, why)

    def _open_links(
        self,
        job_hash: bytes,
        incarnation: int,
        address: tuple[str, int],
        dead_ns: int,
        receiver: Receiver,
    ) -> Links:
        around = self._node.around
        gate = None
        if around.settings.interleave == "auto":
            gate = Pacing(
                job_dir=self._node.job_dir,
                hosts=self._node.machine.hosts,
                memory=self._memory,
                clock=self._node.machine.clock,
                journal=self._journal,
                interface_of=lambda host: INTERFACE,
            )
        return SimLinks(
            around.network,
            self.process,
            job_hash,
            incarnation,
            address,
            dead_ns,
            receiver,
            gate,
            StreamLimits.of(around.settings.link_streams),
        )

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self.process.after(self._node.around.plan.loop_ns, self._hear_peers)

    def _hear_peers(self) -> None:
        self._is_woken = False
        self.run.hear_peers()


class AgentLife:
    """One life of the machine's agent. `attempt`: the newest that it takes part in. `exit_code`:
    once it ended by itself. `last_word`: with which code the job ends here, once it has said so.
    `signalled`: the first signal that it or one before it was sent."""

    def __init__(self, node: SimNode, follows: Predecessor | None) -> None:
        around = node.around
        machine = node.machine
        self.node = node
        self.process = process = machine.start("agent")
        self.follows = follows
        self.began_ns = around.world.now_ns
        self.exit_code: int | None = None
        self.attempt = -1
        self.last_word: int | None = None
        self.signalled: int | None = (follows.signum or None) if follows is not None else None
        journal = SimJournal(machine, "agent", self._recorded)
        self.ranks = SimRankProcesses(
            agent=process,
            ranks=around.launch.ranks,
            new_program=node.new_program,
            connect_agent=node.connect_standby,
            start_ns=lambda: around.plan.takes_ns("rank_start_ns", node.random),
            notice_ns=lambda: around.plan.takes_ns("notice_ns", node.random),
            on_kill=around.observers.killed,
        )
        world = AgentWorld(
            clock=machine.clock,
            timers=SimTimers(process),
            memory=SimMemory(machine.files, process),
            journal=journal,
            executor=SimExecutor(process, around.plan.work_ns),
            keepers=node.keepers(process, AGENT_WITH_KEEPER, journal),
            processes=self.ranks,
            probes=SimProbes(process, self._is_waiting),
            serve_boxes=partial(self._serve, journal),
            open_kv=partial(around.kv.open, process),
            meeting_places=SimMeetingPlaces(around.meetings, process),
            provider=None,
            token=lambda: f"{node.random.getrandbits(128):032x}",
            take_part=self._take_part,
            say_last_word=self._say_last_word,
            show=lambda text: around.world.note(process.name, text),
            pid=process.pid,
            interpreter="python",
        )
        options = AgentOptions.of(around.settings, around.launch, machine.host, predecessor=follows)
        if around.plan.look_ns:
            deadlines = replace(options.deadlines, tick_ns=around.plan.look_ns)
            options = replace(options, deadlines=deadlines)
        self._world = world
        self._options = options
        self.agent: Agent | None = None  # once it has begun

    def _recorded(self, machine: Machine, event: Event) -> None:
        around = self.node.around
        around.observers.recorded(machine, event)
        if event.kind == "nodes-awaited" and "least" in event.data:
            around.awaited(event.data["least"])

    def begin(self) -> None:
        """In its process."""
        self.agent = Agent(self._world, self._options, self.node.around.launch, self._done)
        self.agent.begin()

    def signal(self, signum: int) -> None:
        """By way of its supervisor."""
        if self.signalled is None:
            self.signalled = signum
        self.process.after(MS_NS, self._signalled, signum)

    def _signalled(self, signum: int) -> None:
        if self.agent is None:
            self.process.end("a signal, before it had begun")
        else:
            self.agent.signalled(signum)

    def _is_waiting(self, process: Process) -> bool | None:
        program = self.node.around.programs.get(process)
        return None if program is None else program.is_waiting

    def _serve(self, journal: SimJournal, path: Path, hearer: Hearer) -> BoxServer:
        listen, tell = self.node.sockets.listen, RefusedMessages(journal).tell
        return listen(self.process, path, AGENT_WITH_PROCESS, lambda box: hearer, tell)

    def _take_part(self, attempt: int) -> None:
        self.process.touch("take part")
        self.attempt = attempt

    def _say_last_word(self, exit_code: int) -> None:
        self.process.touch("say last word")
        self.last_word = exit_code

    def _done(self, outcome: int | KeepstepError) -> None:
        self.exit_code = outcome if isinstance(outcome, int) else 1
        self.process.end(f"the job ended here: {outcome}")


def _place_of(environ: Mapping[str, str]) -> RegroupAt:
    """Where the ranks of its attempt meet."""
    return RegroupAt(
        attempt=int(environ["KEEPSTEP_ATTEMPT"]),
        host=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
    )


def _untold(kind: str, why: str) -> None:
    """A process that stands by has no journal."""
