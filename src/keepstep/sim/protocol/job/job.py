"""SimJob: a whole simulated cluster with a job on it, and how a run of it ends.

Comes in: a plan and a seed. Goes out: an `SimOutcome`: what was violated, what was done, and a
digest of everything that happened.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepstep.config import Settings, resolve
from keepstep.errors import MemoryBudgetError
from keepstep.model.launch import Launch
from keepstep.model.units import S_NS
from keepstep.model.wire import Address
from keepstep.runtime.agent.meeting_record import OPENING
from keepstep.runtime.agent.signed_kv import EPOCH_LETTERS, MAC_LETTERS
from keepstep.sim.protocol.job.launcher import ForeignLauncher
from keepstep.sim.protocol.job.meetings import Meetings
from keepstep.sim.protocol.job.nodes import SimNode
from keepstep.sim.protocol.job.observer import Observer, Observers
from keepstep.sim.protocol.job.oracle import Kinds, Oracle
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.job.surroundings import Surroundings
from keepstep.sim.protocol.wire.network import Network
from keepstep.sim.protocol.world.filesystem import SharedDisk
from keepstep.sim.protocol.world.kv import KVPath, KVPlace
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import Crash, World

MEETING_PORT = 29400
MAX_RESTARTS = 1000
KEPT = 2  # checkpoints
SECRET = "of every job of the swarm that has one"
UNLIMITED = "node=unlimited,crash=unlimited,hang=unlimited"


@dataclass(frozen=True)
class SimOutcome:
    """`wrong`: what was violated, None when nothing was. `port_calls`: by the role of the process
    that made them."""

    seed: int
    wrong: str | None
    digest: int
    virtual_ns: int
    events: int
    faults: int
    port_calls: dict[str, int]
    lost_steps: int
    trace: Sequence[str]


class SimJob:
    """`violations` ends the run as soon as there is one. `waits`: whether somebody else, who shares
    its store, has not ended yet."""

    def __init__(
        self,
        plan: RunPlan,
        world: World,
        disk: SharedDisk | None = None,
        states: int | None = None,
    ) -> None:
        """`disk`: where the store is; one of its own unless given. `states`: the seed of what is
        trained; the world's unless given."""
        self.plan = plan
        self.world = world
        self.nodes: list[SimNode] = []  # by their machines' numbers
        self.violations: list[str] = []
        self.faults: list[str] = []
        self.lost_steps = 0
        self.was_told_to_end = False  # by a signal
        # A machine is lost; where its keeper has listened.
        self.on_lost: Callable[[Machine, list[Address]], None] = lambda machine, addresses: None
        self._random = world.stream("job")
        world.on_crash = self._crashed
        network = Network(world, plan.wires)
        first_host = Machine(world, 0, None, 0).host
        self.around = Surroundings(
            world=world,
            plan=plan,
            settings=_settings(plan),
            launch=_launch(plan, first_host),
            network=network,
            disk=disk or SharedDisk(world.stream("disk")),
            kv=KVPlace(world, KVPath()),
            meetings=Meetings(world, network),
            oracle=Oracle(
                world.seed if states is None else states,
                plan.world_size,
                plan.nbytes,
                Kinds(plan.replicas, plan.astray),
            ),
            observers=Observers([]),
            awaited=self._awaited,
        )
        self.waits: Callable[[], bool] = lambda: False
        self._needed = plan.min_nodes  # nodes without which the job cannot go on
        self.launcher: ForeignLauncher | None = None
        self._hosts: set[int] = set()  # machines that have had the meeting point's name

    def watch(self, observers: Sequence[Observer]) -> None:
        """From now on these hear of everything. Before `begin`."""
        around = self.around
        around.observers = Observers(observers)
        if around.observers.wants("said"):
            around.network.on_send = around.observers.said
        if around.observers.wants("heard"):
            around.network.on_hear = around.observers.heard
        around.network.on_link = around.observers.linked
        around.kv.on_write = self._unsigned if self.plan.signs else around.observers.written
        if around.observers.wants("removed"):
            around.disk.on_remove.append(around.observers.removed)

    def _unsigned(self, key: str, value: str) -> None:
        """Those who judge read what was signed."""
        signature = MAC_LETTERS + (0 if key == OPENING else EPOCH_LETTERS)
        self.around.observers.written(key, value[signature:])

    def begin(self) -> None:
        """Start the cluster."""
        plan = self.plan
        for number in range(plan.nodes):
            rack = f"rack {number % plan.racks}" if plan.racks else None
            self._add_machine(rack, self._random.randrange(plan.start_ns))
        if plan.launcher == "foreign":
            self.launcher = ForeignLauncher(self.around, self.living_nodes)
            self.launcher.begin()

    def _add_machine(self, rack: str | None, delay_ns: int) -> None:
        plan = self.plan
        machine = Machine(
            self.world,
            len(self.nodes),
            rack,
            plan.budget_bytes,
            plan.block_bytes,
            plan.interfaces,
        )
        node = SimNode(self.around, machine)
        self.nodes.append(node)
        if plan.hosts and not any(
            other.machine.number in self._hosts for other in self.living_nodes()
        ):
            self._hosts.add(machine.number)
            self.around.kv.host_at(machine)
        if plan.launcher == "agents":
            self.world.after(delay_ns, None, node.start_agent)

    def lose_machine(self, node: SimNode) -> None:
        """With all that is on it; another one comes after a while, if there is one."""
        machine, network = node.machine, self.around.network
        listens = [at for at, door in network.doors.items() if door.process.machine is machine]
        network.lose(machine.number)
        machine.lose("its machine is lost")
        self.on_lost(machine, listens)
        if self.plan.replaces or len(self.living_nodes()) < self._needed:
            self._replace(machine)

    def _awaited(self, nodes: int) -> None:
        """A person brings what the job cannot do without."""
        self._needed = nodes
        if len(self.living_nodes()) < nodes:
            lost = [node.machine for node in self.nodes if not node.machine.alive]
            self._replace(lost[-1])

    def _replace(self, lost: Machine) -> None:
        self._add_machine(lost.rack, self.plan.takes_ns("replace_ns", self._random))

    def living_nodes(self) -> list[SimNode]:
        return [node for node in self.nodes if node.machine.alive]

    def is_latecomer(self, node: SimNode) -> bool:
        """It waits for its place among others that have trained: whoever ends it ends nothing
        else, and leaves the job without a node."""
        others = any(has_taken_part(other) for other in self.nodes)
        return others and not has_taken_part(node)

    @property
    def world_size(self) -> int:
        """With all nodes."""
        return self.plan.world_size

    @property
    def has_many_agents(self) -> bool:
        """Whether agents meet where all have access."""
        return self.plan.launcher == "agents" and self.plan.nodes > 1

    def struck(self, what: str) -> None:
        """Something has gone wrong."""
        self.faults.append(what)
        self.world.note("nemesis", what)
        self.around.observers.struck(what)

    def violate(self, property_: str, what: str) -> None:
        self.violations.append(f"{property_}: {what}")
        self.world.note("checker", f"VIOLATED {property_}: {what}")
        self.world.stop()

    def _crashed(self, crash: Crash) -> None:
        # Where not even a page can be had, who ends so is started again.
        if not isinstance(crash.error, MemoryBudgetError):
            self.violate("no crash", str(crash))

    # -- the end

    @property
    def is_over(self) -> bool:
        """Everything of ours has ended on all machines."""
        if self.launcher is not None and not self.launcher.is_over:
            return False
        living = self.living_nodes()
        has_ended = self.launcher is not None or all(n.exit_code is not None for n in living)
        return has_ended and not any(node.machine.processes for node in living)

    def look_for_its_end(self) -> None:
        """The world stops then."""
        self.world.after(S_NS, None, self._look)

    def _look(self) -> None:
        if self.is_over and not self.waits():
            self.world.stop()
            return
        self._end_latecomers()
        self.world.after(S_NS, None, self._look)

    def _end_latecomers(self) -> None:
        """Where the job has ended elsewhere, the platform ends what waits for it to begin: to an
        agent that comes then it may be another run of the job."""
        living = self.living_nodes()
        if all(node.exit_code is None for node in living):
            return
        for node in living:
            has_come = has_taken_part(node)
            if node.agent is not None and node.agent.signalled is None and not has_come:
                self.was_told_to_end = True
                node.agent.signal(signal.SIGTERM)

    def run(self) -> SimOutcome:
        """From its beginning to its end."""
        self.begin()
        return self.finish()

    def finish(self) -> SimOutcome:
        """To its end, once it has begun."""
        world = self.world
        self.look_for_its_end()
        world.run(self.plan.limit_ns)
        if not self.violations and not self.is_over:
            self.violations.append(
                f"liveness: the job has not ended after {world.now_ns / S_NS:.0f} s"
            )
        if not self.violations:
            self.around.observers.over()
        return SimOutcome(
            seed=world.seed,
            wrong="; ".join(self.violations) or None,
            digest=world.trace.digest,
            virtual_ns=world.now_ns,
            events=world.events,
            faults=len(self.faults),
            port_calls=dict(world.calls),
            lost_steps=self.lost_steps,
            trace=tuple(world.trace.lines),
        )


def has_taken_part(node: SimNode) -> bool:
    """In an attempt of the job."""
    return any(event.kind == "attempt-formed" for event in node.machine.events)


def _launch(plan: RunPlan, first_host: str) -> Launch:
    return Launch(
        command=("python", "train.py"),
        argv=("train.py",),
        ranks=plan.ranks_per_node,
        max_restarts=MAX_RESTARTS,
        nodes=plan.nodes,
        min_nodes=plan.min_nodes or plan.nodes,
        endpoint=(first_host, MEETING_PORT) if plan.nodes > 1 else None,
        job=plan.job,
    )


def _settings(plan: RunPlan) -> Settings:
    config = {
        "job": plan.job,
        "adopt": plan.adopts,
        "store": "simulated://store" if plan.store else None,
        "persist_every_steps": plan.persist_every_steps,
        "keep": f"latest:{KEPT}",
        "slots": plan.slots,
        "link_streams": plan.link_streams,
        "arena_dir": "/memory",
        "grace_s": plan.grace_s,
        "state_dir": "/state",
        "scrub_every_s": plan.scrub_every_s,
        "redundancy": plan.policy,
        "link_dead_s": plan.link_dead_s,
        "shrink_after_s": plan.shrink_after_s,
        "interleave": "auto" if plan.interleaves else "off",
        "budget": UNLIMITED,
        "share_replicas": plan.shares_over if plan.replicas else "off",
        "secret": SECRET if plan.signs else None,
    }
    return resolve(config, {"HOME": "/nowhere"}, plan.job)
